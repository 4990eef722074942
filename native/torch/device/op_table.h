// The ops that this process has sent, by identity: name, schema and tags. torch reuses the address of an op
// that was destroyed (torch.library.Library._destroy), so an address identifies an op only until the next one
// is.
#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>

#include "op_traits.h"

namespace genie {

struct KnownOp {
  uint32_t number;                  // not assigned to another identity
  bool depends_on_kernel_settings;  // it is neither elementwise nor a view
  OpTraits traits;
};

// Computed once per identity, and kept as long as the process.
const KnownOp& get_known_op(const c10::OperatorHandle& op);

}  // namespace genie
