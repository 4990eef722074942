// Encodes the template of a call: DefineTemplate of wire.h.
#pragma once

#include <vector>

#include <ATen/core/stack.h>

#include "op_traits.h"
#include "templates.h"

namespace genie {

// `outputs`: the predicted ones; null for a DynamicOp.
WireWriter encode_template_body(const c10::OperatorHandle& op, const OpTraits& traits,
                                const torch::jit::Stack& stack, size_t first_argument,
                                const std::vector<OutputSpec>* outputs);
void write_define_template(WireWriter& records, uint32_t number, const WireWriter& body);

}  // namespace genie
