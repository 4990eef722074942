// Copies from one executor to another, which go there directly.
#pragma once

#include <ATen/core/Tensor.h>

namespace genie {

// Both are remote, on different devices. Returns before it is done, like any op.
void copy_across(const at::Tensor& target, const at::Tensor& source);

}  // namespace genie
