// Encodes the template of a call: DefineTemplate of wire.h.
#pragma once

#include <vector>

#include <ATen/core/stack.h>

#include "op_traits.h"
#include "templates.h"

namespace genie {

// `outputs`: the predicted ones; null for a DynamicOp.
Writer template_body(const c10::OperatorHandle& op, const OpTraits& traits, const torch::jit::Stack& stack,
                     size_t base, const std::vector<Output>* outputs);
void write_template(Writer& records, uint32_t number, const Writer& body);

}  // namespace genie
