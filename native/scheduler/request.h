// Request classes and candidates. A request class is registered once; requests refer to it by number.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "node_set.h"

namespace genie {

constexpr int kGpusPerNodeMax = 16;
constexpr int kGpuModelsMax = 64;
using GpuMask = uint16_t;       // bit g: GPU g of a node
using GpuModelMask = uint64_t;  // bit m: GPU model m

constexpr int kWholeGpuMilli = 1000;
constexpr GpuModelMask kAnyGpuModel = ~GpuModelMask{0};

// Number of GPUs in a set. The baseline instruction set has no popcount, and a call is slower.
constexpr int count_gpus(GpuMask gpus) {
  unsigned sums = gpus - (gpus >> 1 & 0x5555u);
  sums = (sums & 0x3333u) + (sums >> 2 & 0x3333u);
  sums = (sums + (sums >> 4)) & 0x0f0fu;
  return static_cast<int>((sums + (sums >> 8)) & 0x1fu);
}

// An invalid call; Python gets genie.errors.UsageError.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct RequestClass {
  int gpu_count = 0;      // different GPUs of one node
  int milli_per_gpu = 0;  // thousandths of each GPU
  int memory_per_gpu_mib = 0;
  int cpu_milli = 0;
  int memory_mib = 0;
  GpuModelMask allowed_gpu_models = kAnyGpuModel;  // bit m: model m is allowed
  bool needs_one_island = false;                   // all its GPUs in one NVLink island
  GpuMask allowed_gpus = 0xffff;                   // bit g: GPU g of a node is allowed
  std::optional<NodeSet> allowed_nodes;            // nullopt: all
  int64_t total_gpu_milli() const { return int64_t{gpu_count} * milli_per_gpu; }
  bool requests_gpu_fraction() const { return gpu_count > 0 && milli_per_gpu < kWholeGpuMilli; }
  RequestClass without_node_constraints() const {
    return {gpu_count,        milli_per_gpu, memory_per_gpu_mib, cpu_milli, memory_mib, allowed_gpu_models,
            needs_one_island, 0xffff,        std::nullopt};
  }
  bool allows_node(size_t node) const { return !allowed_nodes || allowed_nodes->contains(node); }
};

// A place on a node. The lower (cost, tie_breaker) is better.
struct PlacementCandidate {
  double cost = 0;
  uint64_t tie_breaker = 0;
  GpuMask gpus = 0;  // bit g: GPU g
};

}  // namespace genie
