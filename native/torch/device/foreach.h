// Ops over lists of tensors (`_foreach_*`), which optimizers use: sent whole where that is possible.
#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace genie {

inline bool is_foreach_op(const std::string& name) { return name.rfind("aten::_foreach_", 0) == 0; }

// Boxed kernel: sends the op whole if all tensors are on one executor, else one op per tensor, as torch does
// for tensors on several devices.
void send_foreach_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace genie
