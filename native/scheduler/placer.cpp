#include "placer.h"

#include <algorithm>
#include <bit>

#include "gpu_selection.h"

namespace genie {
namespace {

constexpr size_t kHistoryLength = 200;  // requests to learn from
constexpr uint64_t kFirstUpdateAfterRequests =
    25;  // requests; the interval doubles up to kUpdateIntervalRequests
constexpr uint64_t kUpdateIntervalRequests = 200;
constexpr int64_t kLearningWork = 2000;  // of begin_learning(), see WorkBudget

}  // namespace

Placer::Placer(const std::string& policy, uint64_t seed, std::vector<TypicalShape> typical,
               const SupplyOptions& options)
    : options_(options), next_update_at_request_(kFirstUpdateAfterRequests), random_(seed) {
  current_state_ = std::make_unique<LearnedState>();
  if (policy == "dotprod") {
    current_state_->policy = make_dotprod();
  } else if (policy == "clustering") {
    current_state_->policy = make_clustering();
  } else if (policy == "packing") {
    current_state_->policy = make_packing();
  } else if (policy == "bestfit") {
    current_state_->policy = make_bestfit();
  } else if (policy == "fgd") {
    current_state_->policy = make_fgd(std::move(typical));
  } else if (policy == "supply") {
    learn_from_history();
  } else if (policy == "random") {
    is_random_ = true;
  } else {
    throw UsageError("unknown placement policy '" + policy + "'");
  }
}

void Placer::observe(int request_class, uint32_t tenant) {
  const RequestClass& request = cluster_.request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  if (was_precompute_called_) {
    current_state_->cache.add_class(cluster_, request_class, tenant);
    if (next_state_ != nullptr) next_state_->cache.add_class(cluster_, request_class, tenant);
  }
  if (current_state_->supply == nullptr) return;
  if (history_.size() < kHistoryLength) history_.emplace_back();
  RequestClass& remembered = history_[observed_requests_ % kHistoryLength];
  remembered = request.without_node_constraints();
  ++observed_requests_;
}

std::optional<NodeChoice> Placer::choose(int request_class, uint32_t tenant, std::optional<int> among) {
  const RequestClass& request = cluster_.request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  if (is_random_) return choose_at_random(request, tenant, allowed);
  adopt_update_if_overdue();
  return current_state_->cache.find_best(cluster_, *current_state_->policy, request_class, tenant, allowed);
}

std::optional<NodeChoice> Placer::place(int request_class, uint32_t tenant, std::optional<int> among) {
  const std::optional<NodeChoice> chosen = choose(request_class, tenant, among);
  if (chosen) cluster_.take(chosen->node, request_class, tenant, chosen->gpus);
  return chosen;
}

std::optional<std::vector<NodeChoice>> Placer::place_gang(const Gang& gang,
                                                          const std::optional<std::vector<int>>& domains,
                                                          std::optional<int> among) {
  cluster_.request_class(gang.request_class);
  if (gang.tenant == 0) throw UsageError("a tenant must be a number from 1");
  if (gang.workers < 1 || gang.workers_min < 0 || gang.workers_min > gang.workers) {
    throw UsageError("a gang needs at least 1 worker, and a minimum that is not above its size");
  }
  if (is_random_) throw UsageError("the policy 'random' does not support gangs");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  std::vector<const NodeSet*> sets;
  if (domains) {
    for (int number : *domains) sets.push_back(&cluster_.node_set(number));
  } else {
    sets.push_back(nullptr);
  }
  adopt_update_if_overdue();
  ClassEvaluations& evaluations = current_state_->cache.up_to_date_evaluations(
      cluster_, *current_state_->policy, gang.request_class, gang.tenant);
  return GangPlacer(cluster_, *current_state_->policy, evaluations, gang).place(sets, allowed);
}

void Placer::drop_class(int request_class) {
  cluster_.drop_class(request_class);
  current_state_->cache.drop_class(request_class);
  if (next_state_ != nullptr) next_state_->cache.drop_class(request_class);
}

// With precompute(), updates are prepared there; if the calls stop, updates must still happen.
void Placer::adopt_update_if_overdue() {
  if (was_precompute_called_ ? observed_requests_ < next_update_at_request_ + kUpdateIntervalRequests
                             : !is_update_due())
    return;
  learn_from_history();
}

bool Placer::precompute(int64_t evaluations_max) {
  if (is_random_) return true;
  was_precompute_called_ = true;
  WorkBudget budget(evaluations_max);
  return current_state_->cache.refresh(cluster_, *current_state_->policy, budget) && refresh_policy(budget) &&
         free_retired_state(budget);
}

// The current state is used until the next one is complete.
bool Placer::refresh_policy(WorkBudget& budget) {
  SupplyPolicy* supply = current_state_->supply;
  if (supply == nullptr) return true;
  if (next_state_ == nullptr) {
    if (observed_requests_ < next_update_at_request_) {
      if (!supply->update_supply(cluster_, budget)) return false;
      if (!supply->is_stale()) return true;
    }
    if (budget.is_exhausted()) return false;
    next_state_ = begin_learning();
    next_state_->cache.add_classes_of(current_state_->cache);
    budget.charge(kLearningWork);
  }
  if (!next_state_->supply->prepare(cluster_, budget)) return false;
  if (!next_state_->cache.refresh(cluster_, *next_state_->policy, budget)) return false;
  // The state that was replaced before may not be freed yet: the assignment would do it at once.
  if (!free_retired_state(budget)) return false;
  retired_state_ = std::move(current_state_);
  current_state_ = std::move(next_state_);
  return true;
}

bool Placer::free_retired_state(WorkBudget& budget) {
  if (retired_state_ == nullptr) return true;
  if (!retired_state_->cache.clear(budget) || budget.is_exhausted()) return false;
  retired_state_.reset();
  return true;
}

bool Placer::is_update_due() {
  SupplyPolicy* supply = current_state_->supply;
  if (supply == nullptr) return false;
  if (observed_requests_ >= next_update_at_request_) return true;
  WorkBudget unlimited(kUnlimitedWork);
  supply->update_supply(cluster_, unlimited);
  return supply->is_stale();
}

void Placer::learn_from_history() {
  WorkBudget unlimited(kUnlimitedWork);
  current_state_ = begin_learning();
  current_state_->supply->prepare(cluster_, unlimited);
  next_state_.reset();
}

std::unique_ptr<Placer::LearnedState> Placer::begin_learning() {
  auto state = std::make_unique<LearnedState>();
  std::unique_ptr<SupplyPolicy> supply;
  if (current_state_->supply != nullptr && observed_requests_ < next_update_at_request_) {
    supply = std::make_unique<SupplyPolicy>(*current_state_->supply);
  } else {
    while (next_update_at_request_ <= observed_requests_)
      next_update_at_request_ += std::min(next_update_at_request_, kUpdateIntervalRequests);
    const auto oldest = history_.begin() + (history_.empty() ? 0 : observed_requests_ % history_.size());
    std::vector<RequestClass> history(oldest, history_.end());
    history.insert(history.end(), history_.begin(), oldest);
    supply = std::make_unique<SupplyPolicy>(cluster_, history, options_);
  }
  state->supply = supply.get();
  state->policy = std::move(supply);
  return state;
}

std::optional<NodeChoice> Placer::choose_at_random(const RequestClass& request, uint32_t tenant,
                                                   const NodeSet* among) {
  // Reservoir sampling: the n-th node that fits replaces the chosen one with probability 1/n.
  std::optional<NodeChoice> chosen;
  uint64_t seen = 0;
  const int nodes = static_cast<int>(cluster_.nodes().size());
  for (int number = 0; number < nodes; ++number) {
    const Node& node = cluster_.nodes()[number];
    if (among != nullptr && !among->contains(number)) continue;
    if (!fits_except_gpus(node, number, request)) continue;
    const uint16_t gpus = choose_tightest_gpus(node, request, tenant);
    if (request.gpus > 0 && gpus == 0) continue;
    if (random_.next() % ++seen == 0) chosen = NodeChoice{number, gpus};
  }
  if (!chosen || request.gpus != 1 || !request.requests_gpu_fraction()) return chosen;
  const Node& node = cluster_.nodes()[chosen->node];
  seen = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_on_gpu(node, g, request, tenant)) continue;
    if (random_.next() % ++seen == 0) chosen->gpus = static_cast<uint16_t>(1 << g);
  }
  return chosen;
}

}  // namespace genie
