// Random numbers: a generator here is the name of one that lives on an executor.
#pragma once

#include <ATen/core/Generator.h>

#include "connection.h"

namespace genie {

// The session's own on that index, whichever executor is there.
at::Generator make_default_generator(int index);
// One more, on the executor that is there now.
at::Generator make_generator(int index);
// Its number on that executor. Raises for a generator of another device.
uint32_t generator_number(const at::Generator& generator, const Connection& connection);

}  // namespace genie
