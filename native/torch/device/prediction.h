// What an op gives, worked out on torch's meta device before the op is sent.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "op_facts.h"
#include "templates.h"

namespace genie {

// `resized`: the op gives some of its arguments another shape, and they have it now; the call is another one.
struct Worked {
  Way way = Way::Ask;
  bool resized = false;
  std::vector<Output> outputs;
};

Worked work_out(const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack,
                size_t base, const std::vector<const at::Tensor*>& inputs);

}  // namespace genie
