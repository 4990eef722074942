#include "expected_node_fills.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "smoothing.h"

namespace genie {
namespace {

uint64_t hash_free_state(const FreeState& state) {
  std::array<uint32_t, sizeof(FreeState) / 4> words;
  std::memcpy(words.data(), &state, sizeof(FreeState));
  uint64_t sum = 0;
  for (uint32_t word : words) sum = (std::rotl(sum, 5) ^ word) * 0x517cc1b727220a95;
  return sum ^ (sum >> 32);
}

}  // namespace

ExpectedNodeFills::ExpectedNodeFills(const Cluster& cluster, const std::vector<RequestClass>& history,
                                     int sequence_length_max)
    : fill_simulation_(cluster, history, sequence_length_max) {
  if (history.empty()) return;
  int gpus_max = 0;
  for (const auto& [hardware, count] : cluster.hardware_counts())
    gpus_max = std::max(gpus_max, hardware.gpu_count);
  for (int gpus = 2; gpus <= gpus_max; gpus *= 2) multi_gpu_counts_.push_back(gpus);
  for (const RequestClass& request : history) {
    if (request.gpus < 2) continue;
    multi_gpu_requests_.push_back({request.gpus, request.cpu_milli, request.memory_mib, request.models_mask});
    if (std::find(multi_gpu_counts_.begin(), multi_gpu_counts_.end(), request.gpus) ==
        multi_gpu_counts_.end()) {
      multi_gpu_counts_.push_back(request.gpus);
    }
  }
}

const ExpectedNodeFill& ExpectedNodeFills::fill_of(const FreeState& state) {
  const uint64_t key = hash_free_state(state);
  Shard& shard = shards_[key >> 55];  // other bits than those of the slot
  if (shard.fills.size() * 2 >= shard.slots.size()) grow_or_clear_cache(shard);
  const size_t mask = shard.slots.size() - 1;
  size_t at = key & mask;
  while (shard.slots[at].is_occupied && !(shard.slots[at].state == state)) at = (at + 1) & mask;
  CachedNodeFill& slot = shard.slots[at];
  if (!slot.is_occupied) {
    slot = {state, true, static_cast<uint32_t>(shard.fills.size())};
    ExpectedNodeFill& fill = shard.fills.emplace_back();
    fill.fill_milli = fill_simulation_.total_filled_milli(state);
    for (size_t j = 0; j < multi_gpu_counts_.size(); ++j)
      fill.capacity[j] = multi_gpu_capacity(multi_gpu_counts_[j], state);
    ++simulation_count_;
  }
  return shard.fills[slot.fill_index];
}

// The GPU thousandths that requests for `gpus` GPUs could use on the node now, summed over the history. For
// smoothing, half a request that needs only GPUs is added.
int64_t ExpectedNodeFills::multi_gpu_capacity(int gpus, const FreeState& state) const {
  const int whole = state.count_free_whole_gpus();
  if (whole < gpus) return 0;
  int64_t slots = std::has_single_bit(static_cast<unsigned>(gpus)) ? whole / gpus : 0;
  for (const MultiGpuRequest& request : multi_gpu_requests_) {
    if (request.gpus != gpus || (request.models_mask >> state.model & 1) == 0) continue;
    int fit = whole / gpus;
    if (request.cpu_milli > 0) fit = std::min(fit, state.cpu_milli / request.cpu_milli);
    if (request.memory_mib > 0) fit = std::min(fit, state.memory_mib / request.memory_mib);
    slots += kSmoothing * fit;
  }
  return slots * gpus * kWholeGpuMilli;
}

// Doubles the shard, or clears it at its maximum size.
void ExpectedNodeFills::grow_or_clear_cache(Shard& shard) {
  if (shard.slots.size() >= kShardSlotsMax) {
    shard.slots.assign(shard.slots.size(), CachedNodeFill{});
    shard.fills.clear();
    return;
  }
  std::vector<CachedNodeFill> old(std::max(shard.slots.size() * 2, kShardSlotsMin));
  old.swap(shard.slots);
  for (const CachedNodeFill& slot : old) {
    if (!slot.is_occupied) continue;
    size_t at = hash_free_state(slot.state) & (shard.slots.size() - 1);
    while (shard.slots[at].is_occupied) at = (at + 1) & (shard.slots.size() - 1);
    shard.slots[at] = slot;
  }
}

}  // namespace genie
