// Infers the outputs of an op on torch's meta device, before the op is sent.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "op_traits.h"
#include "templates.h"

namespace genie {

// `has_resized_arguments`: the op resizes some of its arguments, which has been applied; the key of the call
// has changed.
struct InferredOutputs {
  OpExecutionMode mode = OpExecutionMode::AwaitReply;
  bool has_resized_arguments = false;
  std::vector<OutputSpec> outputs;
};

InferredOutputs infer_outputs(const c10::OperatorHandle& op, const OpTraits& traits,
                              const torch::jit::Stack& stack, size_t first_argument,
                              const std::vector<const at::Tensor*>& inputs);

}  // namespace genie
