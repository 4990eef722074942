#include "evaluation_cache.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gpu_selection.h"

namespace genie {
namespace {

constexpr double kCostIfNotFitting = std::numeric_limits<double>::infinity();
constexpr int64_t kAllocatedNodesPerWorkUnit =
    16;  // allocating memory for 16 nodes takes as long as one evaluation

}  // namespace

// First the least cost, without branches, then the node that has it.
NodeEvaluation ClassEvaluations::find_best_in_block(int block) const {
  constexpr int kVectorLanes = 8;
  const int begin = block * kNodesPerBlock;
  std::array<double, kVectorLanes> least;
  std::copy_n(cost_by_node.begin() + begin, kVectorLanes, least.begin());
  for (int i = kVectorLanes; i < kNodesPerBlock; i += kVectorLanes) {
    for (int lane = 0; lane < kVectorLanes; ++lane) {
      least[lane] =
          cost_by_node[begin + i + lane] < least[lane] ? cost_by_node[begin + i + lane] : least[lane];
    }
  }
  const double found = *std::min_element(least.begin(), least.end());
  int best = -1;
  for (int node = begin; node < begin + kNodesPerBlock; ++node) {
    if (cost_by_node[node] == found && (best < 0 || tie_breaker_by_node[node] < tie_breaker_by_node[best]))
      best = node;
  }
  return evaluation_of(best);
}

// Compares costs first: few nodes are better, so the branch is predicted and tie breakers are rarely read.
void ClassEvaluations::replace_if_better_in_block(NodeEvaluation& best, int block,
                                                  uint64_t allowed_nodes) const {
  const double* costs = cost_by_node.data() + static_cast<size_t>(block) * kNodesPerBlock;
  for (; allowed_nodes != 0; allowed_nodes &= allowed_nodes - 1) {
    const int offset = std::countr_zero(allowed_nodes);
    if (costs[offset] > best.cost) continue;
    const NodeEvaluation found = evaluation_of(block * kNodesPerBlock + offset);
    if (found.fits() && found.is_better_than(best)) best = found;
  }
}

std::optional<NodeChoice> EvaluationCache::find_best_node(const Cluster& cluster, PlacementPolicy& policy,
                                                          int request_class, uint32_t tenant,
                                                          const NodeSet* among) {
  const ClassEvaluations& evaluations = get_updated_evaluations(cluster, policy, request_class, tenant);
  NodeEvaluation best;
  const std::vector<NodeEvaluation>& best_node_by_block = evaluations.best_node_by_block;
  for (const NodeEvaluation& found : best_node_by_block) {
    if (found.is_better_than(best) && (among == nullptr || among->contains(found.node))) best = found;
  }
  // A block whose best node is better, but not allowed, may have another one.
  for (int block = 0; among != nullptr && block < static_cast<int>(best_node_by_block.size()); ++block) {
    if (best_node_by_block[block].is_better_than(best))
      evaluations.replace_if_better_in_block(best, block, among->mask_of_block(block));
  }
  if (!best.fits()) return std::nullopt;
  return NodeChoice{best.node, evaluations.gpus_by_node[best.node]};
}

ClassEvaluations& EvaluationCache::get_updated_evaluations(const Cluster& cluster, PlacementPolicy& policy,
                                                           int request_class, uint32_t tenant) {
  ClassEvaluations& evaluations = get_or_add_evaluations(cluster, request_class, tenant);
  update_evaluations(evaluations, cluster, policy);
  return evaluations;
}

void EvaluationCache::start_tracking_capacity(ClassEvaluations& evaluations, const Cluster& cluster) {
  if (evaluations.tracks_capacity) return;
  evaluations.tracks_capacity = true;
  evaluations.capacity_by_node.assign(evaluations.cost_by_node.size(), 0);
  const RequestClass& request = cluster.request_class(evaluations.request_class);
  for (int node = 0; node < static_cast<int>(evaluations.cost_by_node.size()); ++node) {
    if (evaluations.evaluation_of(node).fits())
      evaluations.capacity_by_node[node] =
          request_capacity(cluster.nodes()[node], request, evaluations.tenant);
  }
}

bool EvaluationCache::update_all_evaluations(const Cluster& cluster, PlacementPolicy& policy,
                                             WorkBudget& budget) {
  ClassEvaluations* latest = nullptr;
  for (auto& [key, evaluations] : evaluations_by_class_) {
    if (evaluations.last_use_number == use_count_) {
      latest = &evaluations;
    } else if (!update_evaluations(evaluations, cluster, policy, budget)) {
      return false;
    }
  }
  // The class that was used last is likely to be used next: update it last to keep it in the CPU cache.
  return latest == nullptr || update_evaluations(*latest, cluster, policy, budget);
}

void EvaluationCache::copy_classes_from(const EvaluationCache& other) {
  for (const auto& [key, evaluations] : other.evaluations_by_class_) {
    ClassEvaluations& prepared = evaluations_by_class_[key];
    prepared.request_class = evaluations.request_class;
    prepared.tenant = evaluations.tenant;
    prepared.last_use_number = evaluations.last_use_number;
    prepared.tracks_capacity = evaluations.tracks_capacity;
  }
  use_count_ = other.use_count_;
}

ClassEvaluations& EvaluationCache::get_or_add_evaluations(const Cluster& cluster, int request_class,
                                                          uint32_t tenant) {
  // The tenant matters only for fractions.
  const uint32_t seen_as = cluster.request_class(request_class).requests_gpu_fraction() ? tenant : 1;
  const uint64_t key = uint64_t{static_cast<uint32_t>(request_class)} << 32 | seen_as;
  auto found = evaluations_by_class_.find(key);
  if (found == evaluations_by_class_.end()) {
    if (evaluations_by_class_.size() >= kCachedClassesMax) drop_least_recently_used_class();
    found = evaluations_by_class_.try_emplace(key).first;
    found->second.request_class = request_class;
    found->second.tenant = seen_as;
  }
  found->second.last_use_number = ++use_count_;
  return found->second;
}

void EvaluationCache::drop_request_class(int request_class) {
  std::erase_if(evaluations_by_class_,
                [&](const auto& item) { return item.second.request_class == request_class; });
}

bool EvaluationCache::drop_all_classes(WorkBudget& budget) {
  while (!evaluations_by_class_.empty()) {
    if (budget.is_exhausted()) return false;
    budget.charge(static_cast<int64_t>(evaluations_by_class_.begin()->second.cost_by_node.size()) /
                  kAllocatedNodesPerWorkUnit);
    evaluations_by_class_.erase(evaluations_by_class_.begin());
  }
  return true;
}

void EvaluationCache::drop_least_recently_used_class() {
  const auto older = [](const auto& a, const auto& b) {
    return a.second.last_use_number < b.second.last_use_number;
  };
  evaluations_by_class_.erase(
      std::min_element(evaluations_by_class_.begin(), evaluations_by_class_.end(), older));
}

void EvaluationCache::update_evaluations(ClassEvaluations& evaluations, const Cluster& cluster,
                                         PlacementPolicy& policy) {
  WorkBudget budget(kUnlimitedWorkUnits);
  update_evaluations(evaluations, cluster, policy, budget);
}

bool EvaluationCache::update_evaluations(ClassEvaluations& evaluations, const Cluster& cluster,
                                         PlacementPolicy& policy, WorkBudget& budget) {
  const auto evaluate_node = [&](int node) {
    const uint64_t before = policy.fill_simulation_count();
    evaluate_and_store_node(evaluations, cluster, policy, node);
    budget.charge(1 +
                  kFillSimulationWorkUnits * static_cast<int64_t>(policy.fill_simulation_count() - before));
  };
  const int nodes = static_cast<int>(cluster.nodes().size());
  if (evaluations.change_log_position < cluster.oldest_logged_change()) evaluations.evaluated_nodes_end = 0;
  if (evaluations.evaluated_nodes_end == 0) evaluations.change_log_position = cluster.change_count();
  if (static_cast<int>(evaluations.cost_by_node.size()) < nodes) {
    if (budget.is_exhausted()) return false;
    budget.charge(nodes / kAllocatedNodesPerWorkUnit);
    const auto blocks = static_cast<size_t>(nodes + kNodesPerBlock - 1) / kNodesPerBlock;
    evaluations.cost_by_node.resize(blocks * kNodesPerBlock, kCostIfNotFitting);
    evaluations.tie_breaker_by_node.resize(blocks * kNodesPerBlock);
    evaluations.gpus_by_node.resize(blocks * kNodesPerBlock);
    if (evaluations.tracks_capacity) evaluations.capacity_by_node.resize(blocks * kNodesPerBlock);
    // No node of a new block fits yet: any may be its best.
    for (size_t block = evaluations.best_node_by_block.size(); block < blocks; ++block) {
      evaluations.best_node_by_block.push_back(
          evaluations.evaluation_of(static_cast<int>(block) * kNodesPerBlock));
    }
  }
  for (; evaluations.evaluated_nodes_end < nodes; ++evaluations.evaluated_nodes_end) {
    if (budget.is_exhausted()) return false;
    evaluate_node(evaluations.evaluated_nodes_end);
  }
  for (; evaluations.change_log_position < cluster.change_count(); ++evaluations.change_log_position) {
    if (budget.is_exhausted()) return false;
    evaluate_node(cluster.node_of_change(evaluations.change_log_position));
  }
  return true;
}

void EvaluationCache::evaluate_and_store_node(ClassEvaluations& evaluations, const Cluster& cluster,
                                              PlacementPolicy& policy, int node) {
  const RequestClass& request = cluster.request_class(evaluations.request_class);
  const std::optional<PlacementCandidate> found =
      policy.evaluate_node(cluster, node, request, evaluations.tenant);
  if (!found && !evaluations.evaluation_of(node).fits()) return;
  evaluations.cost_by_node[node] = found ? found->cost : kCostIfNotFitting;
  evaluations.tie_breaker_by_node[node] = found ? found->tie_breaker : 0;
  evaluations.gpus_by_node[node] = found ? found->gpus : GpuMask{0};
  if (evaluations.tracks_capacity)
    evaluations.capacity_by_node[node] =
        found ? request_capacity(cluster.nodes()[node], request, evaluations.tenant) : 0;
  NodeEvaluation& best = evaluations.best_node_by_block[node / kNodesPerBlock];
  if (best.node == node) {
    best = evaluations.find_best_in_block(node / kNodesPerBlock);
  } else if (evaluations.evaluation_of(node).is_better_than(best)) {
    best = evaluations.evaluation_of(node);
  }
}

}  // namespace genie
