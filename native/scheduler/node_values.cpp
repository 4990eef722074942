#include "node_values.h"

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

NodeValues::NodeValues(const Cluster& cluster, const std::vector<RequestClass>& history, int draws)
    : fill_simulation_(cluster, history, draws) {
  if (history.empty()) return;
  int gpus_max = 0;
  for (const Node& node : cluster.nodes()) gpus_max = std::max(gpus_max, node.gpu_count);
  for (int gpus = 2; gpus <= gpus_max; gpus *= 2) multi_gpu_counts_.push_back(gpus);
  for (const RequestClass& request : history) {
    if (request.gpus < 2) continue;
    multi_gpu_requests_.push_back({request.gpus, request.cpu_milli, request.memory_mib, request.models});
    if (std::find(multi_gpu_counts_.begin(), multi_gpu_counts_.end(), request.gpus) ==
        multi_gpu_counts_.end()) {
      multi_gpu_counts_.push_back(request.gpus);
    }
  }
}

const NodeValue& NodeValues::value_of(const FreeState& state) {
  if (values_.size() * 2 >= cached_values_.size()) grow_cache();
  size_t at = hash_free_state(state) & (cached_values_.size() - 1);
  while (cached_values_[at].is_occupied && !(cached_values_[at].state == state))
    at = (at + 1) & (cached_values_.size() - 1);
  if (!cached_values_[at].is_occupied) {
    cached_values_[at] = {state, true, static_cast<uint32_t>(values_.size())};
    NodeValue& value = values_.emplace_back();
    value.fill_milli = fill_simulation_.total_filled_milli(state);
    for (size_t j = 0; j < multi_gpu_counts_.size(); ++j)
      value.capacity[j] = multi_gpu_capacity(multi_gpu_counts_[j], state);
  }
  return values_[cached_values_[at].value_index];
}

// The GPU thousandths that requests for `gpus` GPUs could use on the node now, summed over the history. For
// smoothing, half a request that needs only GPUs is added.
int64_t NodeValues::multi_gpu_capacity(int gpus, const FreeState& state) const {
  const int whole = state.count_free_whole_gpus();
  if (whole < gpus) return 0;
  int64_t slots = std::has_single_bit(static_cast<unsigned>(gpus)) ? whole / gpus : 0;
  for (const MultiGpuRequest& request : multi_gpu_requests_) {
    if (request.gpus != gpus || (request.models >> state.model & 1) == 0) continue;
    int fit = whole / gpus;
    if (request.cpu_milli > 0) fit = std::min(fit, state.cpu_milli / request.cpu_milli);
    if (request.memory_mib > 0) fit = std::min(fit, state.memory_mib / request.memory_mib);
    slots += kSmoothing * fit;
  }
  return slots * gpus * kWholeGpuMilli;
}

// Doubles the table, or clears it at its maximum size.
void NodeValues::grow_cache() {
  if (cached_values_.size() >= kCachedValuesMax) {
    cached_values_.assign(cached_values_.size(), CachedNodeValue{});
    values_.clear();
    return;
  }
  std::vector<CachedNodeValue> old(cached_values_.size() * 2);
  old.swap(cached_values_);
  for (const CachedNodeValue& slot : old) {
    if (!slot.is_occupied) continue;
    size_t at = hash_free_state(slot.state) & (cached_values_.size() - 1);
    while (cached_values_[at].is_occupied) at = (at + 1) & (cached_values_.size() - 1);
    cached_values_[at] = slot;
  }
}

}  // namespace genie
