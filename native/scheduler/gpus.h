// Which GPUs of one node: the tightest that will do, and among equals those that are near to each other.
//
// Near is: in one NVLink island and on one NUMA node; else in one island; else on one NUMA node; else in as
// few islands as can be. Of several such places the one with the least to spare is used, so that larger ones
// stay whole.
#pragma once

#include <cstdint>

#include "cluster.h"

namespace genie {

constexpr int kRoomMax = 65535;

// A set of GPUs is a number with a bit for each.
uint16_t usable_gpus(const Node& node, const RequestClass& wanted, uint32_t tenant);
// The GPUs that leave the least free. 0 when there are not enough.
uint16_t tightest_gpus(const Node& node, const RequestClass& wanted, uint32_t tenant);
// One of GPUs that are equally good.
uint16_t nearest_like(const Node& node, uint16_t alike);
// So many such requests fit at most, if one does; fewer may be.
int room_on(const Node& node, const RequestClass& wanted, uint32_t tenant);

}  // namespace genie
