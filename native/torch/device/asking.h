// Ops whose outputs only the executor knows: it is asked, and what it says may be learned for the next time.
#pragma once

#include <ATen/core/stack.h>

#include "call.h"
#include "op_facts.h"

namespace genie {

// Takes the arguments from the stack and leaves what the op gave. `batch` is held, and let go of.
void ask(const c10::OperatorHandle& op, const OpFacts& facts, const TemplatePtr& known,
         Connection::Batch& batch, const Call& call, torch::jit::Stack* stack);

}  // namespace genie
