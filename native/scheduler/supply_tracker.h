// The supply of a cluster for recent requests: the expected fill of each node, and totals by GPU model.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "node_fill_estimator.h"
#include "work_budget.h"

namespace genie {

class SupplyTracker {
 public:
  // Learns from the last requests, oldest first. Knows no node before update().
  SupplyTracker(const Cluster& cluster, const std::vector<RequestClass>& history, int simulated_arrivals_max)
      : fill_estimator_(cluster, history, simulated_arrivals_max) {}

  // Reads the changes of the cluster; false if the budget is exhausted and changes are left.
  bool read_cluster_changes(const Cluster& cluster, WorkBudget& budget);
  // For a node in its current state. The reference is valid until the next call.
  const ExpectedNodeFill& find_or_update_node_fill(const Cluster& cluster, int number);
  // For any state, as of NodeFillEstimator.
  const ExpectedNodeFill& find_or_simulate_fill_of_state(const NodeFreeState& state) {
    return fill_estimator_.find_or_simulate_fill(state);
  }
  const std::vector<int>& multi_gpu_request_sizes() const {
    return fill_estimator_.multi_gpu_request_sizes();
  }
  uint64_t fill_simulation_count() const { return fill_estimator_.fill_simulation_count(); }
  // Over the open nodes of these models, as of the last update: the fill, and the capacity for
  // multi_gpu_request_sizes()[size_index].
  int64_t total_fill_milli(GpuModelMask gpu_models) const;
  int64_t total_multi_gpu_capacity_milli(GpuModelMask gpu_models, size_t size_index) const;

 private:
  struct TrackedNode {
    uint32_t version = 0;
    bool is_schedulable = false;
    int gpu_model = 0;
    ExpectedNodeFill expected_fill;
  };

  void add_signed_to_totals(const TrackedNode& known, int sign);

  NodeFillEstimator fill_estimator_;
  std::vector<TrackedNode> tracked_nodes_;
  std::array<ExpectedNodeFill, kGpuModelsMax> totals_by_gpu_model_{};
  GpuModelMask gpu_models_of_nodes_ = 0;  // bit mask of the models of the known nodes
  int read_nodes_end_ = 0;                // nodes below this one were read
  uint64_t change_log_position_ = 0;      // position in the change log of the cluster
};

}  // namespace genie
