// Chooses GPUs of one node: the tightest fit, and among equals those that are close to each other.
//
// Close means: in one NVLink island and on one NUMA node; else in one island; else on one NUMA node; else in
// as few islands as possible. Of several such groups the smallest is used, so that larger ones stay whole.
#pragma once

#include <cstdint>

#include "cluster.h"

namespace genie {

constexpr int kRequestCapacityMax = 65535;

// Sets of GPUs are bit masks.
GpuMask find_usable_gpus(const Node& node, const RequestClass& request, uint32_t tenant);
// The GPUs with the least free share; 0 if too few fit.
GpuMask choose_tightest_gpus(const Node& node, const RequestClass& request, uint32_t tenant);
// One of several equal GPUs.
GpuMask choose_closest_gpu(const Node& node, GpuMask equal_gpus);
// An upper bound of the number of such requests that fit, given that one fits.
int request_capacity(const Node& node, const RequestClass& request, uint32_t tenant);

}  // namespace genie
