#include "supply.h"

#include <algorithm>
#include <bit>

#include "doubt.h"
#include "gpus.h"

namespace genie {
namespace {

constexpr int kStaleParts = 10;  // a tenth more or less

// Those of the GPUs that have as much free as this one: no other choice.
uint16_t alike(const Node& node, uint16_t gpus, int gpu) {
  uint16_t found = 0;
  for (; gpus != 0; gpus &= static_cast<uint16_t>(gpus - 1)) {
    const int g = std::countr_zero(gpus);
    if (node.gpus[g].free_milli == node.gpus[gpu].free_milli &&
        node.gpus[g].usable_memory_mib() == node.gpus[gpu].usable_memory_mib()) {
      found |= static_cast<uint16_t>(1 << g);
    }
  }
  return found;
}

}  // namespace

Supply::Supply(const Cluster& cluster, const std::vector<RequestClass>& history, const SupplyOptions& options)
    : options_(options), values_(std::make_shared<Values>(cluster, history, options.draws)) {
  gather(cluster, history);
  weigh(cluster);
}

Supply::Supply(const Cluster& cluster, const Supply& other)
    : options_(other.options_), values_(other.values_), groups_(other.groups_) {
  weigh(cluster);
}

std::optional<Candidate> Supply::judge(const Cluster& cluster, int number, const RequestClass& wanted,
                                       uint32_t tenant) {
  const Node& node = cluster.nodes()[number];
  if (!fits_beside_gpus(node, number, wanted)) return std::nullopt;
  // First what costs little: most nodes that changed are fuller than before.
  const bool is_one = wanted.gpus == 1;
  uint16_t left = is_one ? usable_gpus(node, wanted, tenant) : tightest_gpus(node, wanted, tenant);
  if (wanted.gpus > 0 && left == 0) return std::nullopt;
  recount(cluster, number);
  const double before = known_[number].worth;
  if (!is_one) return candidate(node, wanted, left, before);
  std::optional<Candidate> best;
  uint16_t best_alike = 0;
  while (left != 0) {
    const int g = std::countr_zero(left);
    const uint16_t same = alike(node, left, g);
    left &= static_cast<uint16_t>(~same);
    const Candidate found = candidate(node, wanted, static_cast<uint16_t>(1 << g), before);
    if (best && found.cost >= best->cost) continue;
    best = found;
    best_alike = same;
  }
  if (best) best->gpus = nearest_like(node, best_alike);
  return best;
}

Candidate Supply::candidate(const Node& node, const RequestClass& wanted, uint16_t gpus, double before) {
  const FreeState after = free_state_after(node, wanted, gpus);
  const double cost = before - (after.gpu_count == 0 ? 0 : worth(values_->of(after), node.model));
  // Ties go to the best fit: the least GPU left over, then the least CPU.
  const auto gpu_left = static_cast<uint64_t>(node.free_gpu_milli() - wanted.gpu_volume());
  const auto cpu_left = std::min<uint64_t>((node.free_cpu_milli - wanted.cpu_milli) / 16, 0xffff);
  return {cost, gpu_left << 48 | cpu_left << 32 | node.rank, gpus};
}

double Supply::worth(const Value& value, int model) const {
  double room = 0;
  for (size_t j = 0; j < values_->several().size(); ++j) {
    room += room_weights_[model][j] * static_cast<double>(value.room[j]);
  }
  return fill_weights_[model] * static_cast<double>(value.fill) + options_.gamma * room;
}

bool Supply::is_stale(const Cluster& cluster) {
  uint64_t models = 0;
  if (read_ < cluster.changes_kept_from()) {  // too much has happened to follow it change by change
    for (size_t number = 0; number < cluster.nodes().size(); ++number)
      recount(cluster, static_cast<int>(number));
    read_ = cluster.changes();
    models = kAnyModel;
  }
  for (; read_ < cluster.changes(); ++read_) {
    const int number = cluster.changed(read_);
    if (number < static_cast<int>(known_.size())) models |= uint64_t{1} << known_[number].model;
    recount(cluster, number);
    models |= uint64_t{1} << known_[number].model;
  }
  for (const Group& group : groups_) {
    if ((group.models & models) == 0) continue;
    const int64_t now = supply_of(group);
    if (std::abs(now - group.supply) * kStaleParts > group.supply) return true;
  }
  return false;
}

// What is asked for, in groups, in the order in which they first came.
void Supply::gather(const Cluster& cluster, const std::vector<RequestClass>& history) {
  int64_t volume = 0;
  int64_t count = 0;
  for (const RequestClass& wanted : history) {
    if (wanted.gpus == 0) continue;
    ask(wanted.models, wanted.gpus, kDoubt * wanted.gpu_volume());
    if (wanted.gpus == 1) {
      volume += wanted.gpu_milli;
      ++count;
    }
  }
  if (history.empty()) return;
  uint64_t models = 0;
  for (const Node& node : cluster.nodes()) models |= uint64_t{node.gpu_count > 0} << node.model;
  // Half a request for each number of GPUs from anywhere, half a one spread over the models, and half a
  // request for one GPU of each model.
  for (int gpus : values_->several()) {
    if (!std::has_single_bit(static_cast<unsigned>(gpus))) continue;
    ask(kAnyModel, gpus, int64_t{gpus} * kFullMilli);
    for (int m = 0; m < kModelsMax; ++m) {
      if ((models >> m & 1) != 0)
        ask(uint64_t{1} << m, gpus, int64_t{gpus} * kFullMilli / std::popcount(models));
    }
  }
  for (int m = 0; m < kModelsMax; ++m) {
    if ((models >> m & 1) != 0 && count > 0) ask(uint64_t{1} << m, 1, volume / count);
  }
}

void Supply::ask(uint64_t models, int gpus, int64_t volume) {
  if (!options_.by_model) models = kAnyModel;
  for (Group& group : groups_) {
    if (group.models == models && group.gpus == gpus) {
      group.volume += volume;
      return;
    }
  }
  groups_.push_back({models, gpus, volume});
}

// The pressure on a model's nodes: over every group that may use them, what the group asks for divided by
// what all nodes that it may use can still supply.
void Supply::weigh(const Cluster& cluster) {
  for (size_t number = 0; number < cluster.nodes().size(); ++number)
    recount(cluster, static_cast<int>(number));
  read_ = cluster.changes();
  for (Group& group : groups_) {
    group.supply = supply_of(group);
    if (group.supply == 0) continue;
    const double pressure = static_cast<double>(group.volume) / static_cast<double>(group.supply);
    for (int m = 0; m < kModelsMax; ++m) {
      if ((group.models >> m & 1) == 0) continue;
      (group.gpus > 1 ? room_weights_[m][index_of(group.gpus)] : fill_weights_[m]) += pressure;
    }
  }
  for (size_t number = 0; number < known_.size(); ++number) {
    known_[number].worth = worth(known_[number].value, cluster.nodes()[number].model);
  }
}

int64_t Supply::supply_of(const Group& group) const {
  const size_t j = group.gpus > 1 ? index_of(group.gpus) : 0;
  int64_t supply = 0;
  for (int m = 0; m < kModelsMax; ++m) {
    if ((group.models >> m & 1) != 0) supply += group.gpus > 1 ? totals_[m].room[j] : totals_[m].fill;
  }
  return supply;
}

size_t Supply::index_of(int gpus) const {
  const std::vector<int>& several = values_->several();
  return static_cast<size_t>(std::find(several.begin(), several.end(), gpus) - several.begin());
}

// Brings what is known of a node up to its present state.
void Supply::recount(const Cluster& cluster, int number) {
  const Node& node = cluster.nodes()[number];
  if (number >= static_cast<int>(known_.size())) known_.resize(cluster.nodes().size());
  Known& known = known_[number];
  if (known.version == node.version) return;
  count(known, -1);
  const FreeState state = free_state(node);
  known.version = node.version;
  known.open = node.open;
  known.model = node.model;
  known.value = state.gpu_count == 0 ? Value{} : values_->of(state);
  known.worth = worth(known.value, node.model);
  count(known, 1);
}

void Supply::count(const Known& known, int sign) {
  if (!known.open) return;
  totals_[known.model].fill += sign * known.value.fill;
  for (size_t j = 0; j < values_->several().size(); ++j) {
    totals_[known.model].room[j] += sign * known.value.room[j];
  }
}

}  // namespace genie
