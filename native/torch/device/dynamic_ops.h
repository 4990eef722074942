// Ops whose output shapes only the executor knows: the reply describes them, and may be cached for the next
// call.
#pragma once

#include <ATen/core/stack.h>

#include "op_call.h"
#include "op_traits.h"

namespace genie {

// Pops the arguments from the stack and pushes the outputs. `writer` is held on entry, and released.
void run_dynamic_op(const c10::OperatorHandle& op, const OpTraits& traits,
                    const CachedTemplatePtr& cached_template, Connection::LockedRecordWriter& writer,
                    const OpCall& call, torch::jit::Stack* stack);

}  // namespace genie
