// Checks of pooling, padding, upsampling, convolution and attention, for argument_checks.cpp.
#pragma once

#include <string>

#include "argument_checks.h"

namespace genie {

// Null if there is none.
ArgumentCheck find_spatial_check(const std::string& op_name);

}  // namespace genie
