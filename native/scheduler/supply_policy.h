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
  double gamma = 0.05;           // the weight of multi-GPU capacity
  bool by_model = true;          // false: one pressure for all models, for ablation
  int sequence_length_max = 60;  // maximum length of a simulated sequence
};

class SupplyPolicy final : public Policy {
 public:
  // Learns from the last requests, oldest first, including those without GPUs.
  SupplyPolicy(const Cluster& cluster, const std::vector<RequestClass>& history,
               const SupplyOptions& options);
  // The same demand, with new weights.
  explicit SupplyPolicy(const SupplyPolicy& other);

  // Computes the weights for the current supply, once; false if the budget was exhausted before. Call it
  // until it returns true, before anything else.
  bool prepare(const Cluster& cluster, WorkBudget& budget);
  std::optional<Candidate> evaluate(const Cluster& cluster, int number, const RequestClass& request,
                                    uint32_t tenant) override;
  uint64_t simulation_count() const override { return tracker_->simulation_count(); }
  // Reads the changes of the cluster for is_stale(); false if the budget was exhausted before.
  bool update_supply(const Cluster& cluster, WorkBudget& budget) { return tracker_->update(cluster, budget); }
  // Whether the supply of a group has changed too much since the weights were computed.
  bool is_stale() const;

 private:
  // Requests for a number of GPUs of these models.
  struct DemandGroup {
    uint64_t models_mask;
    int gpus;
    int64_t requested_gpu_milli;
    int64_t supply = 0;  // when the weights were computed
  };

  void estimate_demand(const Cluster& cluster, const std::vector<RequestClass>& history);
  void add_demand(uint64_t models_mask, int gpus, int64_t requested_gpu_milli);
  void compute_weights();
  int64_t current_supply(const DemandGroup& group) const;
  size_t multi_gpu_count_index(int gpus) const;
  double weighted_node_value(const ExpectedNodeFill& fill, int model) const;
  Candidate make_candidate(const Node& node, const RequestClass& request, uint16_t gpus, double value_before);

  SupplyOptions options_;
  std::shared_ptr<SupplyTracker> tracker_;  // shared with policies of the same demand
  std::vector<DemandGroup> demand_groups_;
  bool has_weights_ = false;
  std::array<double, kModelsMax> fill_weights_{};
  std::array<std::array<double, kMultiGpuCountsMax>, kModelsMax> capacity_weights_{};
};

}  // namespace genie
