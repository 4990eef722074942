// Random number generators: a local generator refers to one on an executor.
#pragma once

#include <ATen/core/Generator.h>

#include "connection.h"

namespace genie {

// The default generator of a device index, for whichever executor it has.
at::Generator make_default_generator(int index);
// A new generator, on the current executor of the index.
at::Generator make_generator(int index);
// The number of the generator on that executor. Raises for a generator of another device.
uint32_t check_and_get_generator_number(const at::Generator& generator, const Connection& connection);

}  // namespace genie
