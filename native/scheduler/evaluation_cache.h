// The evaluation of every node for every request class in use, updated incrementally.
#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "policy.h"
#include "work_budget.h"

namespace genie {

constexpr int kNodesPerBlock = 64;  // the word size of a NodeSet

struct NodeChoice {
  int node;
  GpuMask gpus;
};

// The evaluation of a node.
struct NodeEvaluation {
  double cost = std::numeric_limits<double>::infinity();  // infinity: does not fit
  uint64_t tie_breaker = 0;
  int node = -1;

  bool fits() const { return cost != std::numeric_limits<double>::infinity(); }
  bool is_better_than(const NodeEvaluation& other) const {
    if (cost != other.cost) return cost < other.cost;
    return tie_breaker != other.tie_breaker ? tie_breaker < other.tie_breaker : node < other.node;
  }
};

// The evaluations of all nodes for one request class.
struct ClassEvaluations {
  int request_class = 0;
  uint32_t tenant = 0;
  uint64_t last_use_number = 0;      // value of use_count_ at the last use
  uint64_t change_log_position = 0;  // position in the change log of the cluster
  int evaluated_nodes_end = 0;       // nodes below this one are evaluated
  // By node, padded to whole blocks.
  std::vector<double> cost_by_node;
  std::vector<uint64_t> tie_breaker_by_node;
  std::vector<GpuMask> gpus_by_node;
  std::vector<NodeEvaluation> best_node_by_block;  // the best node of each block
  bool tracks_capacity = false;                    // since the first gang
  std::vector<uint16_t> capacity_by_node;          // see request_capacity(); 0 if it does not fit

  NodeEvaluation evaluation_of(int node) const {
    return {cost_by_node[node], tie_breaker_by_node[node], node};
  }
  // The best node of a block; one that does not fit if none does.
  NodeEvaluation find_best_in_block(int block) const;
  // Replaces `best` by the best of these nodes of a block if that is better.
  void replace_if_better_in_block(NodeEvaluation& best, int block, uint64_t allowed_nodes) const;
};

class EvaluationCache {
 public:
  // The best of these nodes (null: all), after evaluating those that changed.
  std::optional<NodeChoice> find_best_node(const Cluster& cluster, PlacementPolicy& policy, int request_class,
                                           uint32_t tenant, const NodeSet* among);
  // Valid until the cluster changes; the reference is valid until the evaluations of another class are added.
  ClassEvaluations& get_updated_evaluations(const Cluster& cluster, PlacementPolicy& policy,
                                            int request_class, uint32_t tenant);
  static void update_evaluations(ClassEvaluations& evaluations, const Cluster& cluster,
                                 PlacementPolicy& policy);
  // From now on capacities are updated, too.
  static void start_tracking_capacity(ClassEvaluations& evaluations, const Cluster& cluster);
  // Evaluates what changed; false if the budget is exhausted and something is left.
  bool update_all_evaluations(const Cluster& cluster, PlacementPolicy& policy, WorkBudget& budget);
  // Adds a class that refresh() is to evaluate.
  void add_request_class(const Cluster& cluster, int request_class, uint32_t tenant) {
    get_or_add_evaluations(cluster, request_class, tenant);
  }
  // Adds the classes of another cache without evaluations.
  void copy_classes_from(const EvaluationCache& other);
  void drop_request_class(int request_class);
  // Drops all classes; false if the budget is exhausted and some are left.
  bool drop_all_classes(WorkBudget& budget);

 private:
  static constexpr size_t kCachedClassesMax = 2048;

  ClassEvaluations& get_or_add_evaluations(const Cluster& cluster, int request_class, uint32_t tenant);
  void drop_least_recently_used_class();
  static bool update_evaluations(ClassEvaluations& evaluations, const Cluster& cluster,
                                 PlacementPolicy& policy, WorkBudget& budget);
  static void evaluate_and_store_node(ClassEvaluations& evaluations, const Cluster& cluster,
                                      PlacementPolicy& policy, int node);

  std::unordered_map<uint64_t, ClassEvaluations> evaluations_by_class_;
  uint64_t use_count_ = 0;
};

}  // namespace genie
