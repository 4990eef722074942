// What the executor says of its memory, to Genie's own calls and to torch.accelerator's.
#pragma once

#include <c10/core/Allocator.h>

#include "connection.h"

namespace genie {

struct ExecutorCounters {
  uint64_t tensors, bytes, bytes_peak, bytes_max, ops;
};

// Waits for the executor, without the GIL. `forget_peak`: from then on the peak is counted anew.
ExecutorCounters executor_counters(Connection& connection, bool forget_peak);

// For the paths of torch that make a storage by themselves, on the current device.
c10::Allocator* allocator();

}  // namespace genie
