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
  void observe(int request_class, uint32_t tenant);
  // `among` and `domains` are node sets; one of the domains must hold the whole gang.
  std::optional<NodeChoice> choose(int request_class, uint32_t tenant, std::optional<int> among);
  std::optional<NodeChoice> place(int request_class, uint32_t tenant, std::optional<int> among);
  std::optional<std::vector<NodeChoice>> place_gang(const Gang& gang,
                                                    const std::optional<std::vector<int>>& domains,
                                                    std::optional<int> among);
  void drop_class(int request_class);
  // Precomputes what the next choices need; false if the budget is exhausted and something is left. Without
  // changes of the cluster, several small budgets have the same effect as a large one.
  bool precompute(int64_t evaluations_max);

 private:
  // A policy with what it has learned, and its evaluations of the nodes.
  struct LearnedState {
    std::unique_ptr<Policy> policy;
    SupplyPolicy* supply = nullptr;  // the same object if the policy learns
    EvaluationCache cache;
  };

  bool is_update_due();
  // Returns a state whose policy must be prepared.
  std::unique_ptr<LearnedState> begin_learning();
  // Learns at once, without a budget.
  void learn_from_history();
  void adopt_update_if_overdue();
  bool refresh_policy(WorkBudget& budget);
  bool free_retired_state(WorkBudget& budget);
  std::optional<NodeChoice> choose_at_random(const RequestClass& request, uint32_t tenant,
                                             const NodeSet* among);

  Cluster cluster_;
  SupplyOptions options_;
  bool is_random_ = false;
  bool was_precompute_called_ = false;  // precompute() is used, so updates are prepared there
  std::unique_ptr<LearnedState> current_state_;
  std::unique_ptr<LearnedState> next_state_;
  std::unique_ptr<LearnedState> retired_state_;  // freed by precompute(): that takes long, too
  std::vector<RequestClass> history_;            // a ring buffer, without allowed nodes and GPUs
  uint64_t observed_requests_ = 0;
  uint64_t next_update_at_request_ = 0;
  SeededRandom random_;
};

}  // namespace genie
