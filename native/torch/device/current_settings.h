// Reads the PyTorch settings of this process and thread that an executor has to apply (../settings.h). Called
// for every op: torch has no notification of changes.
#pragma once

#include "../settings.h"

namespace genie {

BaseSettings current_base_settings();
// The precisions of the other accelerators are `Full`: reading them takes longer than all other settings.
enum class PrecisionsOf : uint8_t { Cpu, Gpu, All };
KernelSettings current_kernel_settings(PrecisionsOf accelerators);

// Raises for a setting that executors do not support.
void check_settings_supported(const Settings& settings);

}  // namespace genie
