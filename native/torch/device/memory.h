// Memory counters of the executor, for torch.remote_accelerator and torch.accelerator.
#pragma once

#include <c10/core/Allocator.h>

#include "connection.h"

namespace genie {

// Waits for the executor, without the GIL. `reset_peak`: resets the peak afterwards.
StatsReply fetch_executor_counters(Connection& connection, bool reset_peak);

// Allocates on the current device, for code in torch that creates a storage itself.
c10::Allocator* remote_allocator();

}  // namespace genie
