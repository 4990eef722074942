// The device type that torch reserves for an out-of-tree backend.
#pragma once

#include <c10/core/DeviceType.h>

namespace genie {

inline constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;

}  // namespace genie
