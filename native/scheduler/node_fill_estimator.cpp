#include "node_fill_estimator.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "smoothing.h"

namespace genie {
namespace {

uint64_t hash_node_free_state(const NodeFreeState& state) {
  std::array<uint32_t, sizeof(NodeFreeState) / 4> words;
  std::memcpy(words.data(), &state, sizeof(NodeFreeState));
  uint64_t sum = 0;
  for (uint32_t word : words) sum = (std::rotl(sum, 5) ^ word) * 0x517cc1b727220a95;
  return sum ^ (sum >> 32);
}

}  // namespace

NodeFillEstimator::NodeFillEstimator(const Cluster& cluster, const std::vector<RequestClass>& history,
                                     int simulated_arrivals_max)
    : fill_simulation_(cluster, history, simulated_arrivals_max) {
  if (history.empty()) return;
  int gpus_max = 0;
  for (const auto& [hardware, count] : cluster.node_counts_by_hardware())
    gpus_max = std::max(gpus_max, hardware.gpu_count);
  for (int gpus = 2; gpus <= gpus_max; gpus *= 2) multi_gpu_request_sizes_.push_back(gpus);
  for (const RequestClass& request : history) {
    if (request.gpu_count < 2) continue;
    multi_gpu_requests_.push_back(
        {request.gpu_count, request.cpu_milli, request.memory_mib, request.allowed_gpu_models});
    if (std::find(multi_gpu_request_sizes_.begin(), multi_gpu_request_sizes_.end(), request.gpu_count) ==
        multi_gpu_request_sizes_.end()) {
      multi_gpu_request_sizes_.push_back(request.gpu_count);
    }
  }
}

const ExpectedNodeFill& NodeFillEstimator::find_or_simulate_fill(const NodeFreeState& state) {
  const uint64_t key = hash_node_free_state(state);
  CacheShard& shard = shards_[key >> 55];  // other bits than those of the slot
  if (shard.fills.size() * 2 >= shard.slots.size()) grow_or_clear_cache(shard);
  const size_t mask = shard.slots.size() - 1;
  size_t at = key & mask;
  while (shard.slots[at].is_occupied && !(shard.slots[at].state == state)) at = (at + 1) & mask;
  CacheSlot& slot = shard.slots[at];
  if (!slot.is_occupied) {
    slot = {state, true, static_cast<uint32_t>(shard.fills.size())};
    ExpectedNodeFill& fill = shard.fills.emplace_back();
    fill.filled_milli_total = fill_simulation_.simulate_total_filled_milli(state);
    for (size_t j = 0; j < multi_gpu_request_sizes_.size(); ++j)
      fill.multi_gpu_capacity_milli[j] = multi_gpu_capacity_milli(multi_gpu_request_sizes_[j], state);
    ++fill_simulation_count_;
  }
  return shard.fills[slot.fill_index];
}

// The GPU thousandths that requests for `gpus` GPUs could use on the node now, summed over the history. For
// smoothing, half a request that needs only GPUs is added.
int64_t NodeFillEstimator::multi_gpu_capacity_milli(int gpus, const NodeFreeState& state) const {
  const int whole = state.count_free_whole_gpus();
  if (whole < gpus) return 0;
  int64_t slots = std::has_single_bit(static_cast<unsigned>(gpus)) ? whole / gpus : 0;
  for (const MultiGpuRequest& request : multi_gpu_requests_) {
    if (request.gpu_count != gpus || (request.allowed_gpu_models >> state.gpu_model & 1) == 0) continue;
    int fit = whole / gpus;
    if (request.cpu_milli > 0) fit = std::min(fit, state.free_cpu_milli / request.cpu_milli);
    if (request.memory_mib > 0) fit = std::min(fit, state.free_memory_mib / request.memory_mib);
    slots += kHalvesPerRequest * fit;
  }
  return slots * gpus * kWholeGpuMilli;
}

// Doubles the shard, or clears it at its maximum size.
void NodeFillEstimator::grow_or_clear_cache(CacheShard& shard) {
  if (shard.slots.size() >= kShardSlotsMax) {
    shard.slots.assign(shard.slots.size(), CacheSlot{});
    shard.fills.clear();
    return;
  }
  std::vector<CacheSlot> old(std::max(shard.slots.size() * 2, kShardSlotsMin));
  old.swap(shard.slots);
  for (const CacheSlot& slot : old) {
    if (!slot.is_occupied) continue;
    size_t at = hash_node_free_state(slot.state) & (shard.slots.size() - 1);
    while (shard.slots[at].is_occupied) at = (at + 1) & (shard.slots.size() - 1);
    shard.slots[at] = slot;
  }
}

}  // namespace genie
