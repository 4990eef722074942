// A call of an op as the executor is told of it once: Template of wire.h.
#pragma once

#include <vector>

#include <ATen/core/stack.h>

#include "op_facts.h"
#include "templates.h"

namespace genie {

// `outputs` are those that are predicted; null: it will be asked.
Writer template_body(const c10::OperatorHandle& op, const OpFacts& facts, const torch::jit::Stack& stack,
                     size_t base, const std::vector<Output>* outputs);
void write_template(Writer& records, uint32_t number, const Writer& body);

}  // namespace genie
