// Tells torch about the device type. Once per process.
#pragma once

namespace genie {

void register_hooks();

}  // namespace genie
