#include "evaluation_cache.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gpu_selection.h"

namespace genie {
namespace {

constexpr double kDoesNotFit = std::numeric_limits<double>::infinity();
constexpr int64_t kNodesPerBudgetUnit = 16;  // allocating memory for 16 nodes takes as long as one evaluation

}  // namespace

// First the least cost, without branches, then the node that has it.
Evaluation ClassEvaluations::best_in_block(int block) const {
  constexpr int kSimulationLanes = 8;
  const int begin = block * kNodesPerBlock;
  std::array<double, kSimulationLanes> least;
  std::copy_n(cost.begin() + begin, kSimulationLanes, least.begin());
  for (int i = kSimulationLanes; i < kNodesPerBlock; i += kSimulationLanes) {
    for (int lane = 0; lane < kSimulationLanes; ++lane) {
      least[lane] = cost[begin + i + lane] < least[lane] ? cost[begin + i + lane] : least[lane];
    }
  }
  const double found = *std::min_element(least.begin(), least.end());
  int best = -1;
  for (int node = begin; node < begin + kNodesPerBlock; ++node) {
    if (cost[node] == found && (best < 0 || tie_breaker[node] < tie_breaker[best])) best = node;
  }
  return evaluation_of(best);
}

// Compares costs first: few nodes are better, so the branch is predicted and tie breakers are rarely read.
void ClassEvaluations::update_best(Evaluation& best, int block, uint64_t among) const {
  const double* costs = cost.data() + static_cast<size_t>(block) * kNodesPerBlock;
  for (; among != 0; among &= among - 1) {
    const int offset = std::countr_zero(among);
    if (costs[offset] > best.cost) continue;
    const Evaluation found = evaluation_of(block * kNodesPerBlock + offset);
    if (found.fits() && found.is_better(best)) best = found;
  }
}

std::optional<NodeChoice> EvaluationCache::find_best(const Cluster& cluster, Policy& policy,
                                                     int request_class, uint32_t tenant,
                                                     const NodeSet* among) {
  const ClassEvaluations& evaluations = up_to_date_evaluations(cluster, policy, request_class, tenant);
  Evaluation best;
  const std::vector<Evaluation>& best_by_block = evaluations.best_by_block;
  for (const Evaluation& found : best_by_block) {
    if (found.is_better(best) && (among == nullptr || among->contains(found.node))) best = found;
  }
  // A block whose best node is better, but not allowed, may have another one.
  for (int block = 0; among != nullptr && block < static_cast<int>(best_by_block.size()); ++block) {
    if (best_by_block[block].is_better(best))
      evaluations.update_best(best, block, among->mask_of_block(block));
  }
  if (!best.fits()) return std::nullopt;
  return NodeChoice{best.node, evaluations.gpus[best.node]};
}

ClassEvaluations& EvaluationCache::up_to_date_evaluations(const Cluster& cluster, Policy& policy,
                                                          int request_class, uint32_t tenant) {
  ClassEvaluations& evaluations = evaluations_for(cluster, request_class, tenant);
  update(evaluations, cluster, policy);
  return evaluations;
}

void EvaluationCache::compute_capacity(ClassEvaluations& evaluations, const Cluster& cluster) {
  if (evaluations.tracks_capacity) return;
  evaluations.tracks_capacity = true;
  evaluations.capacity.assign(evaluations.cost.size(), 0);
  const RequestClass& request = cluster.request_class(evaluations.request_class);
  for (int node = 0; node < static_cast<int>(evaluations.cost.size()); ++node) {
    if (evaluations.evaluation_of(node).fits())
      evaluations.capacity[node] = request_capacity(cluster.nodes()[node], request, evaluations.tenant);
  }
}

bool EvaluationCache::refresh(const Cluster& cluster, Policy& policy, WorkBudget& budget) {
  ClassEvaluations* latest = nullptr;
  for (auto& [key, evaluations] : classes_) {
    if (evaluations.last_used == use_count_) {
      latest = &evaluations;
    } else if (!update(evaluations, cluster, policy, budget)) {
      return false;
    }
  }
  // The class that was used last is likely to be used next: update it last to keep it in the CPU cache.
  return latest == nullptr || update(*latest, cluster, policy, budget);
}

void EvaluationCache::add_classes_of(const EvaluationCache& other) {
  for (const auto& [key, evaluations] : other.classes_) {
    ClassEvaluations& prepared = classes_[key];
    prepared.request_class = evaluations.request_class;
    prepared.tenant = evaluations.tenant;
    prepared.last_used = evaluations.last_used;
    prepared.tracks_capacity = evaluations.tracks_capacity;
  }
  use_count_ = other.use_count_;
}

ClassEvaluations& EvaluationCache::evaluations_for(const Cluster& cluster, int request_class,
                                                   uint32_t tenant) {
  // The tenant matters only for fractions.
  const uint32_t seen_as = cluster.request_class(request_class).requests_gpu_fraction() ? tenant : 1;
  const uint64_t key = uint64_t{static_cast<uint32_t>(request_class)} << 32 | seen_as;
  auto found = classes_.find(key);
  if (found == classes_.end()) {
    if (classes_.size() >= kClassesMax) drop_least_recently_used();
    found = classes_.try_emplace(key).first;
    found->second.request_class = request_class;
    found->second.tenant = seen_as;
  }
  found->second.last_used = ++use_count_;
  return found->second;
}

void EvaluationCache::drop_class(int request_class) {
  std::erase_if(classes_, [&](const auto& item) { return item.second.request_class == request_class; });
}

bool EvaluationCache::clear(WorkBudget& budget) {
  while (!classes_.empty()) {
    if (budget.is_exhausted()) return false;
    budget.charge(static_cast<int64_t>(classes_.begin()->second.cost.size()) / kNodesPerBudgetUnit);
    classes_.erase(classes_.begin());
  }
  return true;
}

void EvaluationCache::drop_least_recently_used() {
  const auto older = [](const auto& a, const auto& b) { return a.second.last_used < b.second.last_used; };
  classes_.erase(std::min_element(classes_.begin(), classes_.end(), older));
}

void EvaluationCache::update(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy) {
  WorkBudget budget(kUnlimitedWork);
  update(evaluations, cluster, policy, budget);
}

bool EvaluationCache::update(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy,
                             WorkBudget& budget) {
  const auto evaluate_node = [&](int node) {
    const uint64_t before = policy.simulation_count();
    evaluate(evaluations, cluster, policy, node);
    budget.charge(1 + kSimulationWork * static_cast<int64_t>(policy.simulation_count() - before));
  };
  const int nodes = static_cast<int>(cluster.nodes().size());
  if (evaluations.change_log_position < cluster.oldest_kept_change()) evaluations.evaluated_up_to = 0;
  if (evaluations.evaluated_up_to == 0) evaluations.change_log_position = cluster.change_count();
  if (static_cast<int>(evaluations.cost.size()) < nodes) {
    if (budget.is_exhausted()) return false;
    budget.charge(nodes / kNodesPerBudgetUnit);
    const auto blocks = static_cast<size_t>(nodes + kNodesPerBlock - 1) / kNodesPerBlock;
    evaluations.cost.resize(blocks * kNodesPerBlock, kDoesNotFit);
    evaluations.tie_breaker.resize(blocks * kNodesPerBlock);
    evaluations.gpus.resize(blocks * kNodesPerBlock);
    if (evaluations.tracks_capacity) evaluations.capacity.resize(blocks * kNodesPerBlock);
    // No node of a new block fits yet: any may be its best.
    for (size_t block = evaluations.best_by_block.size(); block < blocks; ++block) {
      evaluations.best_by_block.push_back(
          evaluations.evaluation_of(static_cast<int>(block) * kNodesPerBlock));
    }
  }
  for (; evaluations.evaluated_up_to < nodes; ++evaluations.evaluated_up_to) {
    if (budget.is_exhausted()) return false;
    evaluate_node(evaluations.evaluated_up_to);
  }
  for (; evaluations.change_log_position < cluster.change_count(); ++evaluations.change_log_position) {
    if (budget.is_exhausted()) return false;
    evaluate_node(cluster.changed_node(evaluations.change_log_position));
  }
  return true;
}

void EvaluationCache::evaluate(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy,
                               int node) {
  const RequestClass& request = cluster.request_class(evaluations.request_class);
  const std::optional<Candidate> found = policy.evaluate(cluster, node, request, evaluations.tenant);
  if (!found && !evaluations.evaluation_of(node).fits()) return;
  evaluations.cost[node] = found ? found->cost : kDoesNotFit;
  evaluations.tie_breaker[node] = found ? found->tie_breaker : 0;
  evaluations.gpus[node] = found ? found->gpus : uint16_t{0};
  if (evaluations.tracks_capacity)
    evaluations.capacity[node] =
        found ? request_capacity(cluster.nodes()[node], request, evaluations.tenant) : 0;
  Evaluation& best = evaluations.best_by_block[node / kNodesPerBlock];
  if (best.node == node) {
    best = evaluations.best_in_block(node / kNodesPerBlock);
  } else if (evaluations.evaluation_of(node).is_better(best)) {
    best = evaluations.evaluation_of(node);
  }
}

}  // namespace genie
