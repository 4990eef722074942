// Registers the device guard and hooks with torch. Call once per process.
#pragma once

namespace genie {

void register_device_guard_and_hooks();

}  // namespace genie
