// Ops that have no kernel of their own here go to the executor through `send_op`.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace genie {

// A boxed kernel for any op: takes its arguments from the stack and leaves what the op gives.
void send_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Registers send_op for every op that torch would otherwise take apart before it reaches a device.
// Once per process; returns how many.
int register_ops();

}  // namespace genie
