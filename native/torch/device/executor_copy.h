// Copies tensors directly from one executor to another.
#pragma once

#include <ATen/core/Tensor.h>

namespace genie {

// Both tensors are remote, on different devices. Asynchronous, like any op.
void copy_between_executors(const at::Tensor& target, const at::Tensor& source);

}  // namespace genie
