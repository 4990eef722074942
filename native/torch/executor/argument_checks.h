// Checks of arguments that torch's kernels trust: shapes, dtypes and constants of a template, before it is
// used.
#pragma once

#include "templates.h"

namespace genie {

// Throws OpRefused if the kernel of the op would access memory outside its arguments. Ops whose kernels check
// their arguments themselves are not checked here.
void check_arguments_that_torch_trusts(const DecodedTemplate& decoded, c10::Device device);

}  // namespace genie
