// The placer: a cluster, a policy, and what the policy has learned. Not thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster.h"
#include "seeded_random.h"
#include "gang.h"
#include "policy.h"
#include "evaluation_cache.h"
#include "supply_policy.h"

namespace genie {

class Placer {
 public:
  Placer(const std::string& policy, uint64_t seed, std::vector<TypicalShape> typical,
         const SupplyOptions& options);

  Cluster& cluster() { return cluster_; }
  const Cluster& cluster() const { return cluster_; }
  // Records the arrival of a request; call it once per request.
  void record_request_arrival(int request_class, uint32_t tenant);
  // `among` and `domains` are node sets; one of the domains must hold the whole gang.
  std::optional<NodeChoice> choose_node(int request_class, uint32_t tenant, std::optional<int> among);
  std::optional<NodeChoice> choose_and_allocate(int request_class, uint32_t tenant, std::optional<int> among);
  std::optional<std::vector<NodeChoice>> place_gang(const Gang& gang,
                                                    const std::optional<std::vector<int>>& domains,
                                                    std::optional<int> among);
  void drop_request_class(int request_class);
  // Precomputes what the next choices need; false if the budget is exhausted and something is left. Without
  // changes of the cluster, several small budgets have the same effect as a large one.
  bool precompute(int64_t evaluations_max);

 private:
  // A policy with what it has learned, and its evaluations of the nodes.
  struct PolicyState {
    std::unique_ptr<PlacementPolicy> policy;
    SupplyPolicy* supply_policy = nullptr;  // the same object if the policy learns
    EvaluationCache evaluation_cache;
  };

  bool update_supply_and_check_learning_due();
  // Returns a state whose policy must be prepared.
  std::unique_ptr<PolicyState> make_unprepared_policy_state();
  // Learns at once, without a budget.
  void replace_policy_state();
  void replace_policy_state_if_overdue();
  bool prepare_next_policy_state(WorkBudget& budget);
  bool free_retired_policy_state(WorkBudget& budget);
  std::optional<NodeChoice> choose_random_node(const RequestClass& request, uint32_t tenant,
                                               const NodeSet* among);

  Cluster cluster_;
  SupplyOptions supply_options_;
  bool chooses_randomly_ = false;
  bool uses_precompute_ = false;  // precompute() is used, so updates are prepared there
  std::unique_ptr<PolicyState> current_policy_state_;
  std::unique_ptr<PolicyState> next_policy_state_;
  std::unique_ptr<PolicyState> retired_policy_state_;  // freed by precompute(): that takes long, too
  std::vector<RequestClass> request_history_;          // a ring buffer, without allowed nodes and GPUs
  uint64_t observed_request_count_ = 0;
  uint64_t next_learning_at_request_ = 0;
  SeededRandom random_;
};

}  // namespace genie
