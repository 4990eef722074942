// The default policy: preserve the supply of resources that recent requests need. See docs/PLACEMENT.md.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy.h"
#include "supply_tracker.h"

namespace genie {

struct SupplyOptions {
  double multi_gpu_capacity_weight = 0.05;
  bool separates_gpu_models = true;  // false: one pressure for all models, for ablation
  int simulated_arrivals_max = 60;   // per sequence
};

class SupplyPolicy final : public PlacementPolicy {
 public:
  // Learns from the last requests, oldest first, including those without GPUs.
  SupplyPolicy(const Cluster& cluster, const std::vector<RequestClass>& history,
               const SupplyOptions& options);
  // The same demand, with new weights.
  explicit SupplyPolicy(const SupplyPolicy& other);

  // Computes the weights for the current supply, once; false if the budget was exhausted before. Call it
  // until it returns true, before anything else.
  bool update_supply_and_compute_weights(const Cluster& cluster, WorkBudget& budget);
  std::optional<PlacementCandidate> evaluate_node(const Cluster& cluster, int number,
                                                  const RequestClass& request, uint32_t tenant) override;
  uint64_t fill_simulation_count() const override { return supply_tracker_->fill_simulation_count(); }
  // Reads the changes of the cluster for are_weights_stale(); false if the budget was exhausted before.
  bool update_supply(const Cluster& cluster, WorkBudget& budget) {
    return supply_tracker_->read_cluster_changes(cluster, budget);
  }
  // Whether the supply of a group has changed too much since the weights were computed.
  bool are_weights_stale() const;

 private:
  // Requests for a number of GPUs of these models.
  struct DemandGroup {
    GpuModelMask allowed_gpu_models;
    int gpu_count;
    int64_t demand_gpu_milli;
    int64_t supply_milli_when_weighted = 0;
  };

  void estimate_demand(const Cluster& cluster, const std::vector<RequestClass>& history);
  void add_demand(GpuModelMask gpu_models, int gpus, int64_t requested_gpu_milli);
  void compute_weights();
  int64_t current_supply_milli(const DemandGroup& group) const;
  size_t multi_gpu_size_index(int gpus) const;
  double weighted_node_value(const ExpectedNodeFill& fill, int model) const;
  PlacementCandidate make_candidate(const Node& node, const RequestClass& request, GpuMask gpus,
                                    double value_before);

  SupplyOptions options_;
  std::shared_ptr<SupplyTracker> supply_tracker_;  // shared with policies of the same demand
  std::vector<DemandGroup> demand_groups_;
  bool has_weights_ = false;
  std::array<double, kGpuModelsMax> fill_weight_by_gpu_model_{};
  std::array<std::array<double, kMultiGpuRequestSizesMax>, kGpuModelsMax> capacity_weights_by_gpu_model_{};
};

}  // namespace genie
