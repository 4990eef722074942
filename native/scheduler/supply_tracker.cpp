#include "supply_tracker.h"

#include <bit>

#include "policy.h"

namespace genie {

bool SupplyTracker::update(const Cluster& cluster, WorkBudget& budget) {
  const auto read = [&](int number) {
    const uint64_t before = simulation_count();
    expected_node_fill(cluster, number);
    budget.charge(1 + kSimulationWork * static_cast<int64_t>(simulation_count() - before));
  };
  if (change_log_position_ < cluster.oldest_kept_change())
    read_up_to_node_ = 0;  // the log no longer has all changes
  if (read_up_to_node_ == 0) {
    change_log_position_ = cluster.change_count();
    tracked_nodes_.reserve(cluster.nodes().size());
  }
  for (; read_up_to_node_ < static_cast<int>(cluster.nodes().size()); ++read_up_to_node_) {
    if (budget.is_exhausted()) return false;
    read(read_up_to_node_);
  }
  for (; change_log_position_ < cluster.change_count(); ++change_log_position_) {
    if (budget.is_exhausted()) return false;
    read(cluster.changed_node(change_log_position_));
  }
  return true;
}

const ExpectedNodeFill& SupplyTracker::expected_node_fill(const Cluster& cluster, int number) {
  const Node& node = cluster.nodes()[number];
  if (number >= static_cast<int>(tracked_nodes_.size()))
    tracked_nodes_.resize(static_cast<size_t>(number) + 1);
  TrackedNode& known = tracked_nodes_[number];
  if (known.version == node.version) return known.fill;
  add_to_totals(known, -1);
  const FreeState state = free_state_of(node);
  known.version = node.version;
  known.is_open = node.is_open;
  known.model = node.model;
  known.fill = state.gpu_count == 0 ? ExpectedNodeFill{} : fills_.fill_of(state);
  models_of_nodes_ |= uint64_t{1} << node.model;
  add_to_totals(known, 1);
  return known.fill;
}

int64_t SupplyTracker::total_fill_milli(uint64_t models_mask) const {
  int64_t total = 0;
  for (models_mask &= models_of_nodes_; models_mask != 0; models_mask &= models_mask - 1)
    total += totals_[std::countr_zero(models_mask)].fill_milli;
  return total;
}

int64_t SupplyTracker::total_multi_gpu_capacity(uint64_t models_mask, size_t count_index) const {
  int64_t total = 0;
  for (models_mask &= models_of_nodes_; models_mask != 0; models_mask &= models_mask - 1)
    total += totals_[std::countr_zero(models_mask)].capacity[count_index];
  return total;
}

void SupplyTracker::add_to_totals(const TrackedNode& known, int sign) {
  if (!known.is_open) return;
  totals_[known.model].fill_milli += sign * known.fill.fill_milli;
  for (size_t j = 0; j < multi_gpu_counts().size(); ++j) {
    totals_[known.model].capacity[j] += sign * known.fill.capacity[j];
  }
}

}  // namespace genie
