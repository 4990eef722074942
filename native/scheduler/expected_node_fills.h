// How far recent requests are expected to fill a node's free resources, cached by state.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fill_simulation.h"

namespace genie {

constexpr int kMultiGpuCountsMax = kGpusMax - 1;  // multi-GPU requests have 2 to 16 GPUs

struct ExpectedNodeFill {
  int64_t fill_milli = 0;                              // see FillSimulation
  std::array<int64_t, kMultiGpuCountsMax> capacity{};  // for each of ExpectedNodeFills::multi_gpu_counts()
};

class ExpectedNodeFills {
 public:
  // Learns from the last requests, oldest first.
  ExpectedNodeFills(const Cluster& cluster, const std::vector<RequestClass>& history,
                    int sequence_length_max);

  // The reference is valid until the next call.
  const ExpectedNodeFill& fill_of(const FreeState& state);
  // The number of fills that were computed, not found in the cache.
  uint64_t simulation_count() const { return simulation_count_; }
  // Numbers of GPUs of multi-GPU requests: powers of two, then others in the history.
  const std::vector<int>& multi_gpu_counts() const { return multi_gpu_counts_; }

 private:
  struct MultiGpuRequest {
    int gpus;
    int cpu_milli;
    int memory_mib;
    uint64_t models_mask;
  };
  struct CachedNodeFill {
    FreeState state;
    bool is_occupied = false;
    uint32_t fill_index = 0;  // in Shard::fills
  };
  // Each part of the hash table grows on its own, so that no call has to copy all of it.
  struct Shard {
    std::vector<CachedNodeFill> slots;
    std::vector<ExpectedNodeFill> fills;
  };
  static constexpr size_t kShards = 512;  // 9 bits of the hash
  static constexpr size_t kShardSlotsMin = 16;
  static constexpr size_t kShardSlotsMax = 1024;

  int64_t multi_gpu_capacity(int gpus, const FreeState& state) const;
  static void grow_or_clear_cache(Shard& shard);

  FillSimulation fill_simulation_;
  std::vector<int> multi_gpu_counts_;
  std::vector<MultiGpuRequest> multi_gpu_requests_;  // for several GPUs
  std::vector<Shard> shards_ = std::vector<Shard>(kShards);
  uint64_t simulation_count_ = 0;
};

}  // namespace genie
