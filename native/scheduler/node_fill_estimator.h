// How far recent requests are expected to fill a node's free resources, cached by state.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fill_simulation.h"

namespace genie {

constexpr int kMultiGpuRequestSizesMax = kGpusPerNodeMax - 1;  // multi-GPU requests have 2 to 16 GPUs

struct ExpectedNodeFill {
  int64_t filled_milli_total = 0;  // see FillSimulation
  std::array<int64_t, kMultiGpuRequestSizesMax>
      multi_gpu_capacity_milli{};  // for each of NodeFillEstimator::multi_gpu_request_sizes()
};

class NodeFillEstimator {
 public:
  // Learns from the last requests, oldest first.
  NodeFillEstimator(const Cluster& cluster, const std::vector<RequestClass>& history,
                    int simulated_arrivals_max);

  // The reference is valid until the next call.
  const ExpectedNodeFill& find_or_simulate_fill(const NodeFreeState& state);
  // The number of fills that were computed, not found in the cache.
  uint64_t fill_simulation_count() const { return fill_simulation_count_; }
  // Numbers of GPUs of multi-GPU requests: powers of two, then others in the history.
  const std::vector<int>& multi_gpu_request_sizes() const { return multi_gpu_request_sizes_; }

 private:
  struct MultiGpuRequest {
    int gpu_count;
    int cpu_milli;
    int memory_mib;
    GpuModelMask allowed_gpu_models;
  };
  struct CacheSlot {
    NodeFreeState state;
    bool is_occupied = false;
    uint32_t fill_index = 0;  // in Shard::fills
  };
  // Each part of the hash table grows on its own, so that no call has to copy all of it.
  struct CacheShard {
    std::vector<CacheSlot> slots;
    std::vector<ExpectedNodeFill> fills;
  };
  static constexpr size_t kCacheShardCount = 512;  // 9 bits of the hash
  static constexpr size_t kShardSlotsMin = 16;
  static constexpr size_t kShardSlotsMax = 1024;

  int64_t multi_gpu_capacity_milli(int gpus, const NodeFreeState& state) const;
  static void grow_or_clear_cache(CacheShard& shard);

  FillSimulation fill_simulation_;
  std::vector<int> multi_gpu_request_sizes_;
  std::vector<MultiGpuRequest> multi_gpu_requests_;  // for several GPUs
  std::vector<CacheShard> shards_ = std::vector<CacheShard>(kCacheShardCount);
  uint64_t fill_simulation_count_ = 0;
};

}  // namespace genie
