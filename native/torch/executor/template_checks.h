// Checks of templates, for ops whose kernels trust shapes, dtypes and constants that a template determines.
#pragma once

#include "templates.h"

namespace genie {

// Throws OpRefused if the kernel of the op would access memory outside its arguments. Ops whose kernels check
// their arguments themselves are not checked here.
void check_template(const DecodedTemplate& decoded, c10::Device device);

}  // namespace genie
