// Ops without a local kernel are sent to the executor by `send_op`.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace genie {

// Boxed kernel for any op: pops the arguments from the stack and pushes the outputs.
void send_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Registers send_op for every op that torch would otherwise decompose. Call once per process; returns the
// number of ops.
int register_sent_ops();

}  // namespace genie
