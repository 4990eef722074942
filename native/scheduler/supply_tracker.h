// The supply of a cluster for recent requests: the expected fill of each node, and totals by GPU model.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "expected_node_fills.h"
#include "work_budget.h"

namespace genie {

class SupplyTracker {
 public:
  // Learns from the last requests, oldest first. Knows no node before update().
  SupplyTracker(const Cluster& cluster, const std::vector<RequestClass>& history, int sequence_length_max)
      : fills_(cluster, history, sequence_length_max) {}

  // Reads the changes of the cluster; false if the budget is exhausted and changes are left.
  bool update(const Cluster& cluster, WorkBudget& budget);
  // For a node in its current state. The reference is valid until the next call.
  const ExpectedNodeFill& expected_node_fill(const Cluster& cluster, int number);
  // For any state, as of ExpectedNodeFills.
  const ExpectedNodeFill& expected_state_fill(const FreeState& state) { return fills_.fill_of(state); }
  const std::vector<int>& multi_gpu_counts() const { return fills_.multi_gpu_counts(); }
  uint64_t simulation_count() const { return fills_.simulation_count(); }
  // Over the open nodes of these models, as of the last update: the fill, and the capacity for
  // multi_gpu_counts()[count_index].
  int64_t total_fill_milli(uint64_t models_mask) const;
  int64_t total_multi_gpu_capacity(uint64_t models_mask, size_t count_index) const;

 private:
  struct TrackedNode {
    uint32_t version = 0;
    bool is_open = false;
    int model = 0;
    ExpectedNodeFill fill;
  };

  void add_to_totals(const TrackedNode& known, int sign);

  ExpectedNodeFills fills_;
  std::vector<TrackedNode> tracked_nodes_;
  std::array<ExpectedNodeFill, kModelsMax> totals_{};
  uint64_t models_of_nodes_ = 0;      // bit mask of the models of the known nodes
  int read_up_to_node_ = 0;           // nodes below this one were read
  uint64_t change_log_position_ = 0;  // position in the change log of the cluster
};

}  // namespace genie
