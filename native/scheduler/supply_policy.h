// The default policy: preserve the supply of resources that recent requests need. See docs/PLACEMENT.md.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy.h"
#include "node_values.h"

namespace genie {

struct SupplyOptions {
  double gamma = 0.05;   // the weight of multi-GPU capacity
  bool by_model = true;  // false: one pressure for all models, for ablation
  int draws = 60;        // maximum length of a simulated sequence
};

class SupplyPolicy final : public Policy {
 public:
  // Learns from the last requests, oldest first, including those without GPUs.
  SupplyPolicy(const Cluster& cluster, const std::vector<RequestClass>& history,
               const SupplyOptions& options);
  // The same demand, with weights for the current supply.
  SupplyPolicy(const Cluster& cluster, const SupplyPolicy& other);

  std::optional<Candidate> evaluate(const Cluster& cluster, int number, const RequestClass& request,
                                    uint32_t tenant) override;
  // Whether the supply of a group has changed too much since the weights were computed.
  bool is_stale(const Cluster& cluster);

 private:
  using ValueByModel = std::array<NodeValue, kModelsMax>;
  // Requests for a number of GPUs of these models.
  struct DemandGroup {
    uint64_t models;
    int gpus;
    int64_t volume;      // requested GPU thousandths
    int64_t supply = 0;  // when the weights were computed
  };
  struct TrackedNode {
    uint32_t version = 0;
    bool is_open = false;
    int model = 0;
    NodeValue value;
    double node_worth = 0;
  };

  void collect_demand(const Cluster& cluster, const std::vector<RequestClass>& history);
  void add_demand(uint64_t models, int gpus, int64_t volume);
  void update_weights(const Cluster& cluster);
  int64_t current_supply(const DemandGroup& group) const;
  size_t multi_gpu_count_index(int gpus) const;
  void update_node(const Cluster& cluster, int number);
  void add_to_totals(const TrackedNode& known, int sign);
  double node_worth(const NodeValue& value, int model) const;
  Candidate make_candidate(const Node& node, const RequestClass& request, uint16_t gpus, double before);

  SupplyOptions options_;
  std::shared_ptr<NodeValues> values_;
  std::vector<DemandGroup> demand_groups_;
  ValueByModel totals_{};
  std::vector<TrackedNode> tracked_nodes_;
  uint64_t change_log_position_ = 0;  // position in the change log of the cluster
  std::array<double, kModelsMax> fill_weights_{};
  std::array<std::array<double, kMultiGpuCountsMax>, kModelsMax> capacity_weights_{};
};

}  // namespace genie
