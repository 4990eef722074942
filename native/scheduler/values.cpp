#include "values.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "doubt.h"

namespace genie {
namespace {

uint64_t hash(const FreeState& state) {
  std::array<uint32_t, sizeof(FreeState) / 4> words;
  std::memcpy(words.data(), &state, sizeof(FreeState));
  uint64_t sum = 0;
  for (uint32_t word : words) sum = (std::rotl(sum, 5) ^ word) * 0x517cc1b727220a95;
  return sum ^ (sum >> 32);
}

}  // namespace

Values::Values(const Cluster& cluster, const std::vector<RequestClass>& history, int draws)
    : fill_(cluster, history, draws) {
  if (history.empty()) return;
  int gpus_max = 0;
  for (const Node& node : cluster.nodes()) gpus_max = std::max(gpus_max, node.gpu_count);
  for (int gpus = 2; gpus <= gpus_max; gpus *= 2) several_.push_back(gpus);
  for (const RequestClass& wanted : history) {
    if (wanted.gpus < 2) continue;
    asked_.push_back({wanted.gpus, wanted.cpu_milli, wanted.memory_mib, wanted.models});
    if (std::find(several_.begin(), several_.end(), wanted.gpus) == several_.end()) {
      several_.push_back(wanted.gpus);
    }
  }
}

const Value& Values::of(const FreeState& state) {
  if (values_.size() * 2 >= slots_.size()) make_space();
  size_t at = hash(state) & (slots_.size() - 1);
  while (slots_[at].used && !(slots_[at].state == state)) at = (at + 1) & (slots_.size() - 1);
  if (!slots_[at].used) {
    slots_[at] = {state, true, static_cast<uint32_t>(values_.size())};
    Value& value = values_.emplace_back();
    value.fill = fill_.of(state);
    for (size_t j = 0; j < several_.size(); ++j) value.room[j] = room_for(several_[j], state);
  }
  return values_[slots_[at].value];
}

// The GPUs that requests for so many could have on the node now, in thousandths, added up over the history's
// requests. Half a request that needs nothing but GPUs counts as one of them.
int64_t Values::room_for(int gpus, const FreeState& state) const {
  const int whole = state.whole_gpus();
  if (whole < gpus) return 0;
  int64_t slots = std::has_single_bit(static_cast<unsigned>(gpus)) ? whole / gpus : 0;
  for (const Asked& asked : asked_) {
    if (asked.gpus != gpus || (asked.models >> state.model & 1) == 0) continue;
    int fit = whole / gpus;
    if (asked.cpu_milli > 0) fit = std::min(fit, state.cpu_milli / asked.cpu_milli);
    if (asked.memory_mib > 0) fit = std::min(fit, state.memory_mib / asked.memory_mib);
    slots += kDoubt * fit;
  }
  return slots * gpus * kFullMilli;
}

// Twice the space, or, at the bound, a new start.
void Values::make_space() {
  if (slots_.size() >= kSlotsMax) {
    slots_.assign(slots_.size(), Slot{});
    values_.clear();
    return;
  }
  std::vector<Slot> old(slots_.size() * 2);
  old.swap(slots_);
  for (const Slot& slot : old) {
    if (!slot.used) continue;
    size_t at = hash(slot.state) & (slots_.size() - 1);
    while (slots_[at].used) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = slot;
  }
}

}  // namespace genie
