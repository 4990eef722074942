#include "evaluation_cache.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gpus.h"

namespace genie {
namespace {

constexpr double kDoesNotFit = std::numeric_limits<double>::infinity();
constexpr int64_t kNodesPerUnit = 16;  // memory for so many nodes takes as long as one evaluation

}  // namespace

// First the least cost, without branches, then the node that has it.
Evaluation ClassEvaluations::best_of(int block) const {
  constexpr int kLanes = 8;
  const int begin = block * kBlock;
  std::array<double, kLanes> least;
  std::copy_n(cost.begin() + begin, kLanes, least.begin());
  for (int i = kLanes; i < kBlock; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      least[lane] = cost[begin + i + lane] < least[lane] ? cost[begin + i + lane] : least[lane];
    }
  }
  const double found = *std::min_element(least.begin(), least.end());
  int best = -1;
  for (int node = begin; node < begin + kBlock; ++node) {
    if (cost[node] == found && (best < 0 || tie[node] < tie[best])) best = node;
  }
  return at(best);
}

// Compares costs first: few nodes are better, so the branch is predicted and ties are rarely read.
void ClassEvaluations::improve(Evaluation& best, int block, uint64_t among) const {
  const double* costs = cost.data() + static_cast<size_t>(block) * kBlock;
  for (; among != 0; among &= among - 1) {
    const int offset = std::countr_zero(among);
    if (costs[offset] > best.cost) continue;
    const Evaluation found = at(block * kBlock + offset);
    if (found.fits() && found.is_better(best)) best = found;
  }
}

std::optional<Choice> EvaluationCache::best(const Cluster& cluster, Policy& policy, int request_class,
                                            uint32_t tenant, const NodeSet* among) {
  const ClassEvaluations& evaluations = current(cluster, policy, request_class, tenant);
  Evaluation best;
  for (const Evaluation& found : evaluations.block_best) {
    if (found.is_better(best) && (among == nullptr || among->has(found.node))) best = found;
  }
  // A block whose best node is better, but not allowed, may have another one.
  for (int block = 0; among != nullptr && block < static_cast<int>(evaluations.block_best.size()); ++block) {
    if (evaluations.block_best[block].is_better(best)) evaluations.improve(best, block, among->word(block));
  }
  if (!best.fits()) return std::nullopt;
  return Choice{best.node, evaluations.gpus[best.node]};
}

ClassEvaluations& EvaluationCache::current(const Cluster& cluster, Policy& policy, int request_class,
                                           uint32_t tenant) {
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
    if (evaluations.at(node).fits())
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

void EvaluationCache::prepare_like(const EvaluationCache& other) {
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
  const uint32_t seen_as = cluster.request_class(request_class).is_fraction() ? tenant : 1;
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
    budget.charge(static_cast<int64_t>(classes_.begin()->second.cost.size()) / kNodesPerUnit);
    classes_.erase(classes_.begin());
  }
  return true;
}

void EvaluationCache::drop_least_recently_used() {
  const auto older = [](const auto& a, const auto& b) { return a.second.last_used < b.second.last_used; };
  classes_.erase(std::min_element(classes_.begin(), classes_.end(), older));
}

void EvaluationCache::update(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy) {
  WorkBudget budget(kUnlimited);
  update(evaluations, cluster, policy, budget);
}

bool EvaluationCache::update(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy,
                             WorkBudget& budget) {
  const auto evaluate_node = [&](int node) {
    const uint64_t before = policy.simulations();
    evaluate(evaluations, cluster, policy, node);
    budget.charge(1 + kSimulationWork * static_cast<int64_t>(policy.simulations() - before));
  };
  const int nodes = static_cast<int>(cluster.nodes().size());
  if (evaluations.changes_read < cluster.changes_kept_from()) evaluations.evaluated_up_to = 0;
  if (evaluations.evaluated_up_to == 0) evaluations.changes_read = cluster.changes();
  if (static_cast<int>(evaluations.cost.size()) < nodes) {
    if (budget.is_exhausted()) return false;
    budget.charge(nodes / kNodesPerUnit);
    const auto blocks = static_cast<size_t>(nodes + kBlock - 1) / kBlock;
    evaluations.cost.resize(blocks * kBlock, kDoesNotFit);
    evaluations.tie.resize(blocks * kBlock);
    evaluations.gpus.resize(blocks * kBlock);
    if (evaluations.tracks_capacity) evaluations.capacity.resize(blocks * kBlock);
    // No node of a new block fits yet: any may be its best.
    for (size_t block = evaluations.block_best.size(); block < blocks; ++block) {
      evaluations.block_best.push_back(evaluations.at(static_cast<int>(block) * kBlock));
    }
  }
  for (; evaluations.evaluated_up_to < nodes; ++evaluations.evaluated_up_to) {
    if (budget.is_exhausted()) return false;
    evaluate_node(evaluations.evaluated_up_to);
  }
  for (; evaluations.changes_read < cluster.changes(); ++evaluations.changes_read) {
    if (budget.is_exhausted()) return false;
    evaluate_node(cluster.changed(evaluations.changes_read));
  }
  return true;
}

void EvaluationCache::evaluate(ClassEvaluations& evaluations, const Cluster& cluster, Policy& policy,
                               int node) {
  const RequestClass& request = cluster.request_class(evaluations.request_class);
  const std::optional<Candidate> found = policy.evaluate(cluster, node, request, evaluations.tenant);
  if (!found && !evaluations.at(node).fits()) return;
  evaluations.cost[node] = found ? found->cost : kDoesNotFit;
  evaluations.tie[node] = found ? found->tie : 0;
  evaluations.gpus[node] = found ? found->gpus : uint16_t{0};
  if (evaluations.tracks_capacity)
    evaluations.capacity[node] =
        found ? request_capacity(cluster.nodes()[node], request, evaluations.tenant) : 0;
  Evaluation& best = evaluations.block_best[node / kBlock];
  if (best.node == node) {
    best = evaluations.best_of(node / kBlock);
  } else if (evaluations.at(node).is_better(best)) {
    best = evaluations.at(node);
  }
}

}  // namespace genie
