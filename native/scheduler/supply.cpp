#include "supply.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>

#include "fill.h"

namespace genie {
namespace {

// That none came does not prove that none will: half a request of 2, 4, 8 ... GPUs is believed to have been in
// the history besides what was. Counts are in halves, then, to stay whole.
constexpr int kDoubt = 2;  // tune

// Requests of one number of GPUs, as the history has them.
struct SeveralGpus {
  int gpus;
  std::vector<const RequestClass*> requests;
};

// j GPUs times the number of such requests that would fit now, in thousandths, added up over the history's.
int64_t room_for(const SeveralGpus& several, const FreeState& state, int model) {
  const int whole = state.whole_gpus();
  int64_t slots = 0;
  if (whole < several.gpus) return 0;
  for (const RequestClass* wanted : several.requests) {
    if ((wanted->models >> model & 1) == 0) continue;
    int fit = whole / several.gpus;
    if (wanted->cpu_milli > 0) fit = std::min(fit, state.cpu_milli / wanted->cpu_milli);
    if (wanted->memory_mib > 0) fit = std::min(fit, state.memory_mib / wanted->memory_mib);
    slots += fit;
  }
  return (kDoubt * slots + whole / several.gpus) * several.gpus * kFullMilli;
}

// Worths by state. A table of fixed bound that starts anew when it is full.
class WorthTable {
 public:
  double* find_or_add(const FreeState& state, bool& is_new) {
    if (used_ * 2 >= slots_.size()) grow();
    size_t at = hash(state) & (slots_.size() - 1);
    while (slots_[at].used && !(slots_[at].state == state)) at = (at + 1) & (slots_.size() - 1);
    is_new = !slots_[at].used;
    if (is_new) {
      slots_[at] = {state, true, 0};
      ++used_;
    }
    return &slots_[at].worth;
  }

 private:
  struct Slot {
    FreeState state;
    bool used = false;
    double worth = 0;
  };
  static constexpr size_t kSlotsMax = size_t{1} << 20;

  static uint64_t hash(const FreeState& state) {
    std::array<uint32_t, sizeof(FreeState) / 4> words;
    std::memcpy(words.data(), &state, sizeof(FreeState));
    uint64_t sum = 0;
    for (uint32_t word : words) sum = (std::rotl(sum, 5) ^ word) * 0x517cc1b727220a95;
    return sum ^ (sum >> 32);
  }

  void grow() {
    const bool full = slots_.size() >= kSlotsMax;
    std::vector<Slot> old(full ? slots_.size() : slots_.size() * 2);
    old.swap(slots_);
    used_ = 0;
    if (full) return;
    for (const Slot& slot : old) {
      bool is_new = false;
      if (slot.used) *find_or_add(slot.state, is_new) = slot.worth;
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(size_t{1} << 14);
  size_t used_ = 0;
};

class Supply final : public Policy {
 public:
  Supply(const Cluster& cluster, const std::vector<int>& history, const SupplyOptions& options)
      : options_(options), fill_(cluster, history, options.draws) {
    int gpus_max = 0;
    for (const Node& node : cluster.nodes()) gpus_max = std::max(gpus_max, node.gpu_count);
    for (int gpus = 2; !history.empty() && gpus <= gpus_max; gpus *= 2) several_for(gpus);
    for (int number : history) {
      const RequestClass& wanted = cluster.classes()[number];
      if (wanted.gpus > 1) several_for(wanted.gpus).requests.push_back(&classes_kept(wanted));
    }
    weigh(cluster, history);
  }

  std::optional<Candidate> judge(const Cluster& cluster, int number, const RequestClass& wanted,
                                 uint32_t tenant) override {
    const Node& node = cluster.nodes()[number];
    if (!fits_beside_gpus(node, number, wanted)) return std::nullopt;
    const double before = worth_of(cluster, number);
    if (wanted.gpus != 1) {
      const uint16_t gpus = tightest_gpus(node, wanted, tenant);
      if (wanted.gpus > 0 && gpus == 0) return std::nullopt;
      return candidate(node, wanted, gpus, before);
    }
    std::optional<Candidate> best;
    for (int g = 0; g < node.gpu_count; ++g) {
      if (!fits_gpu(node.gpus[g], wanted, tenant) || is_repeated(node, wanted, tenant, g)) continue;
      const Candidate found = candidate(node, wanted, static_cast<uint16_t>(1 << g), before);
      if (!best || found.cost < best->cost) best = found;
    }
    return best;
  }

 private:
  // A GPU with as much free as an earlier one that will do is no other choice.
  static bool is_repeated(const Node& node, const RequestClass& wanted, uint32_t tenant, int gpu) {
    for (int g = 0; g < gpu; ++g) {
      if (node.gpus[g].free_milli == node.gpus[gpu].free_milli &&
          node.gpus[g].free_memory_mib == node.gpus[gpu].free_memory_mib &&
          fits_gpu(node.gpus[g], wanted, tenant)) {
        return true;
      }
    }
    return false;
  }

  Candidate candidate(const Node& node, const RequestClass& wanted, uint16_t gpus, double before) {
    const double cost = before - worth(free_state_after(node, wanted, gpus), node.model);
    // Ties go to the best fit: the least GPU left over, then the least CPU.
    const auto gpu_left = static_cast<uint64_t>(node.free_gpu_milli() - wanted.gpu_volume());
    const auto cpu_left = std::min<uint64_t>((node.free_cpu_milli - wanted.cpu_milli) / 16, 0xffff);
    return {cost, gpu_left << 48 | cpu_left << 32 | node.rank, gpus};
  }

  double worth_of(const Cluster& cluster, int number) {
    const Node& node = cluster.nodes()[number];
    if (number >= static_cast<int>(known_.size())) known_.resize(cluster.nodes().size());
    if (known_[number].version != node.version) {
      known_[number] = {node.version, worth(free_state(node), node.model)};
    }
    return known_[number].worth;
  }

  double worth(const FreeState& state, int model) {
    if (state.gpu_count == 0) return 0;
    bool is_new = false;
    double* kept = worths_.find_or_add(state, is_new);
    if (is_new) {
      double several = 0;
      for (size_t j = 0; j < several_.size(); ++j) {
        several += several_weights_[model][j] * static_cast<double>(room_for(several_[j], state, model));
      }
      *kept = fill_weights_[model] * static_cast<double>(fill_.of(state)) + options_.gamma * several;
    }
    return *kept;
  }

  SeveralGpus& several_for(int gpus) {
    const auto same = [&](const SeveralGpus& one) { return one.gpus == gpus; };
    const auto found = std::find_if(several_.begin(), several_.end(), same);
    if (found != several_.end()) return *found;
    several_.push_back({gpus, {}});
    return several_.back();
  }

  // Classes may move when more are registered.
  const RequestClass& classes_kept(const RequestClass& wanted) {
    return *kept_.emplace_back(std::make_unique<RequestClass>(wanted));
  }

  void weigh(const Cluster& cluster, const std::vector<int>& history);

  SupplyOptions options_;
  Fill fill_;
  std::vector<std::unique_ptr<RequestClass>> kept_;
  std::vector<SeveralGpus> several_;
  std::array<double, kModelsMax> fill_weights_{};
  std::array<std::vector<double>, kModelsMax> several_weights_;
  WorthTable worths_;
  struct Known {
    uint32_t version = 0;
    double worth = 0;
  };
  std::vector<Known> known_;
};

// The pressure on a model's nodes: over every set of models with this one in it, what is asked of the set
// divided by what the set can still supply.
void Supply::weigh(const Cluster& cluster, const std::vector<int>& history) {
  std::array<int64_t, kModelsMax> fill_supply{};
  std::vector<std::array<int64_t, kModelsMax>> several_supply(several_.size());
  for (const Node& node : cluster.nodes()) {
    if (!node.open) continue;
    const FreeState state = free_state(node);
    fill_supply[node.model] += fill_.of(state);
    for (size_t j = 0; j < several_.size(); ++j) {
      several_supply[j][node.model] += room_for(several_[j], state, node.model);
    }
  }
  for (auto& weights : several_weights_) weights.assign(several_.size(), 0.0);
  std::vector<std::pair<uint64_t, int>> groups;  // (models, GPUs) in the order in which they first came
  std::map<std::pair<uint64_t, int>, int64_t> volumes;
  const auto ask = [&](uint64_t models, int gpus, int64_t volume) {
    const std::pair<uint64_t, int> group{options_.by_model ? models : kAnyModel, gpus};
    if (volumes[group] == 0) groups.push_back(group);
    volumes[group] += volume;
  };
  for (int number : history) {
    const RequestClass& wanted = cluster.classes()[number];
    if (wanted.gpus > 0) ask(wanted.models, wanted.gpus, kDoubt * wanted.gpu_volume());
  }
  for (const SeveralGpus& several : several_) {
    if (std::has_single_bit(static_cast<unsigned>(several.gpus))) ask(kAnyModel, several.gpus, several.gpus * kFullMilli);
  }
  for (const auto& group : groups) {
    const auto [models, gpus] = group;
    size_t j = 0;
    while (gpus > 1 && several_[j].gpus != gpus) ++j;
    const std::array<int64_t, kModelsMax>& supplies = gpus > 1 ? several_supply[j] : fill_supply;
    int64_t supply = 0;
    for (int m = 0; m < kModelsMax; ++m) supply += (models >> m & 1) != 0 ? supplies[m] : 0;
    if (supply == 0) continue;
    const double pressure = static_cast<double>(volumes[group]) / static_cast<double>(supply);
    for (int m = 0; m < kModelsMax; ++m) {
      if ((models >> m & 1) == 0) continue;
      (gpus > 1 ? several_weights_[m][j] : fill_weights_[m]) += pressure;
    }
  }
}

}  // namespace

std::unique_ptr<Policy> make_supply(const Cluster& cluster, const std::vector<int>& history,
                                    const SupplyOptions& options) {
  return std::make_unique<Supply>(cluster, history, options);
}

}  // namespace genie
