#include "supply_tracker.h"

#include <bit>

#include "policy.h"

namespace genie {

bool SupplyTracker::update(const Cluster& cluster, WorkBudget& budget) {
  const auto read = [&](int number) {
    const uint64_t before = simulations();
    node_value(cluster, number);
    budget.charge(1 + kSimulationWork * static_cast<int64_t>(simulations() - before));
  };
  if (changes_read_ < cluster.changes_kept_from()) known_up_to_ = 0;  // the log no longer has all changes
  if (known_up_to_ == 0) {
    changes_read_ = cluster.changes();
    known_nodes_.reserve(cluster.nodes().size());
  }
  for (; known_up_to_ < static_cast<int>(cluster.nodes().size()); ++known_up_to_) {
    if (budget.is_exhausted()) return false;
    read(known_up_to_);
  }
  for (; changes_read_ < cluster.changes(); ++changes_read_) {
    if (budget.is_exhausted()) return false;
    read(cluster.changed(changes_read_));
  }
  return true;
}

const NodeValue& SupplyTracker::node_value(const Cluster& cluster, int number) {
  const Node& node = cluster.nodes()[number];
  if (number >= static_cast<int>(known_nodes_.size())) known_nodes_.resize(static_cast<size_t>(number) + 1);
  KnownNode& known = known_nodes_[number];
  if (known.version == node.version) return known.value;
  add_to_totals(known, -1);
  const FreeState state = free_state(node);
  known.version = node.version;
  known.open = node.open;
  known.model = node.model;
  known.value = state.gpu_count == 0 ? NodeValue{} : values_.of(state);
  models_ |= uint64_t{1} << node.model;
  add_to_totals(known, 1);
  return known.value;
}

int64_t SupplyTracker::total_fill(uint64_t models) const {
  int64_t total = 0;
  for (models &= models_; models != 0; models &= models - 1) total += totals_[std::countr_zero(models)].fill;
  return total;
}

int64_t SupplyTracker::total_capacity(uint64_t models, size_t index) const {
  int64_t total = 0;
  for (models &= models_; models != 0; models &= models - 1)
    total += totals_[std::countr_zero(models)].capacity[index];
  return total;
}

void SupplyTracker::add_to_totals(const KnownNode& known, int sign) {
  if (!known.open) return;
  totals_[known.model].fill += sign * known.value.fill;
  for (size_t j = 0; j < multi_gpu_counts().size(); ++j) {
    totals_[known.model].capacity[j] += sign * known.value.capacity[j];
  }
}

}  // namespace genie
