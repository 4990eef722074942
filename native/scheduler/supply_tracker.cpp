#include "supply_tracker.h"

#include <bit>

#include "policy.h"

namespace genie {

bool SupplyTracker::read_cluster_changes(const Cluster& cluster, WorkBudget& budget) {
  const auto read = [&](int number) {
    const uint64_t before = fill_simulation_count();
    find_or_update_node_fill(cluster, number);
    budget.charge(1 + kFillSimulationWorkUnits * static_cast<int64_t>(fill_simulation_count() - before));
  };
  if (change_log_position_ < cluster.oldest_logged_change())
    read_nodes_end_ = 0;  // the log no longer has all changes
  if (read_nodes_end_ == 0) {
    change_log_position_ = cluster.change_count();
    tracked_nodes_.reserve(cluster.nodes().size());
  }
  for (; read_nodes_end_ < static_cast<int>(cluster.nodes().size()); ++read_nodes_end_) {
    if (budget.is_exhausted()) return false;
    read(read_nodes_end_);
  }
  for (; change_log_position_ < cluster.change_count(); ++change_log_position_) {
    if (budget.is_exhausted()) return false;
    read(cluster.node_of_change(change_log_position_));
  }
  return true;
}

const ExpectedNodeFill& SupplyTracker::find_or_update_node_fill(const Cluster& cluster, int number) {
  const Node& node = cluster.nodes()[number];
  if (number >= static_cast<int>(tracked_nodes_.size()))
    tracked_nodes_.resize(static_cast<size_t>(number) + 1);
  TrackedNode& known = tracked_nodes_[number];
  if (known.version == node.version) return known.expected_fill;
  add_signed_to_totals(known, -1);
  const NodeFreeState state = node_free_state(node);
  known.version = node.version;
  known.is_schedulable = node.is_schedulable;
  known.gpu_model = node.gpu_model;
  known.expected_fill =
      state.partly_free_gpu_count == 0 ? ExpectedNodeFill{} : fill_estimator_.find_or_simulate_fill(state);
  gpu_models_of_nodes_ |= uint64_t{1} << node.gpu_model;
  add_signed_to_totals(known, 1);
  return known.expected_fill;
}

int64_t SupplyTracker::total_fill_milli(GpuModelMask gpu_models) const {
  int64_t total = 0;
  for (gpu_models &= gpu_models_of_nodes_; gpu_models != 0; gpu_models &= gpu_models - 1)
    total += totals_by_gpu_model_[std::countr_zero(gpu_models)].filled_milli_total;
  return total;
}

int64_t SupplyTracker::total_multi_gpu_capacity_milli(GpuModelMask gpu_models, size_t size_index) const {
  int64_t total = 0;
  for (gpu_models &= gpu_models_of_nodes_; gpu_models != 0; gpu_models &= gpu_models - 1)
    total += totals_by_gpu_model_[std::countr_zero(gpu_models)].multi_gpu_capacity_milli[size_index];
  return total;
}

void SupplyTracker::add_signed_to_totals(const TrackedNode& known, int sign) {
  if (!known.is_schedulable) return;
  totals_by_gpu_model_[known.gpu_model].filled_milli_total += sign * known.expected_fill.filled_milli_total;
  for (size_t j = 0; j < multi_gpu_request_sizes().size(); ++j) {
    totals_by_gpu_model_[known.gpu_model].multi_gpu_capacity_milli[j] +=
        sign * known.expected_fill.multi_gpu_capacity_milli[j];
  }
}

}  // namespace genie
