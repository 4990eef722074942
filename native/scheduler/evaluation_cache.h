// The evaluation of every node for every request class in use, updated incrementally.
#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "policy.h"
#include "work_budget.h"

namespace genie {

constexpr int kNodesPerBlock = 64;  // nodes; the word size of a NodeSet

struct NodeChoice {
  int node;
  uint16_t gpus;
};

// The evaluation of a node.
struct Evaluation {
  double cost = std::numeric_limits<double>::infinity();  // infinity: does not fit
  uint64_t tie_breaker = 0;
  int node = -1;

  bool fits() const { return cost != std::numeric_limits<double>::infinity(); }
  bool is_better(const Evaluation& other) const {
    if (cost != other.cost) return cost < other.cost;
    return tie_breaker != other.tie_breaker ? tie_breaker < other.tie_breaker : node < other.node;
  }
};

// The evaluations of all nodes for one request class.
struct ClassEvaluations {
  int request_class = 0;
  uint32_t tenant = 0;
  uint64_t last_used = 0;            // value of use_count_ at the last use
  uint64_t change_log_position = 0;  // position in the change log of the cluster
  int evaluated_up_to = 0;           // nodes below this one are evaluated
  // By node, padded to whole blocks.
  std::vector<double> cost;
  std::vector<uint64_t> tie_breaker;
  std::vector<uint16_t> gpus;
  std::vector<Evaluation> best_by_block;  // the best node of each block
  bool tracks_capacity = false;           // since the first gang
  std::vector<uint16_t> capacity;         // see request_capacity(); 0 if it does not fit

  Evaluation evaluation_of(int node) const { return {cost[node], tie_breaker[node], node}; }
  // The best node of a block; one that does not fit if none does.
  Evaluation best_in_block(int block) const;
  // Replaces `best` by the best of these nodes of a block if that is better.
  void update_best(Evaluation& best, int block, uint64_t among) const;
};

class EvaluationCache {
 public:
  // The best of these nodes (null: all), after evaluating those that changed.
  std::optional<NodeChoice> find_best(const Cluster& cluster, Policy& policy, int request_class,
                                      uint32_t tenant, const NodeSet* among);
  // Valid until the cluster changes; the reference is valid until the evaluations of another class are added.
  ClassEvaluations& up_to_date_evaluations(const Cluster& cluster, Policy& policy, int request_class,
                                           uint32_t tenant);
  static void update(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy);
  // From now on capacities are updated, too.
  static void compute_capacity(ClassEvaluations& evaluations, const Cluster& cluster);
  // Evaluates what changed; false if the budget is exhausted and something is left.
  bool refresh(const Cluster& cluster, Policy& policy, WorkBudget& budget);
  // Adds a class that refresh() is to evaluate.
  void add_class(const Cluster& cluster, int request_class, uint32_t tenant) {
    evaluations_for(cluster, request_class, tenant);
  }
  // Adds the classes of another cache without evaluations.
  void add_classes_of(const EvaluationCache& other);
  void drop_class(int request_class);
  // Drops all classes; false if the budget is exhausted and some are left.
  bool clear(WorkBudget& budget);

 private:
  static constexpr size_t kClassesMax = 2048;

  ClassEvaluations& evaluations_for(const Cluster& cluster, int request_class, uint32_t tenant);
  void drop_least_recently_used();
  static bool update(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy,
                     WorkBudget& budget);
  static void evaluate(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy, int node);

  std::unordered_map<uint64_t, ClassEvaluations> classes_;
  uint64_t use_count_ = 0;
};

}  // namespace genie
