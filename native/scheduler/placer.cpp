#include "placer.h"

#include <algorithm>
#include <bit>

#include "gpu_selection.h"

namespace genie {
namespace {

constexpr size_t kHistoryRequestsMax = 200;  // requests to learn from
constexpr uint64_t kFirstLearningAfterRequests =
    25;  // requests; the interval doubles up to kLearningIntervalRequestsMax
constexpr uint64_t kLearningIntervalRequestsMax = 200;
constexpr int64_t kLearningWorkUnits = 2000;  // of make_unprepared_policy_state(), see WorkBudget

}  // namespace

Placer::Placer(const std::string& policy, uint64_t seed, std::vector<TypicalShape> typical,
               const SupplyOptions& options)
    : supply_options_(options), next_learning_at_request_(kFirstLearningAfterRequests), random_(seed) {
  current_policy_state_ = std::make_unique<PolicyState>();
  if (policy == "dotprod") {
    current_policy_state_->policy = make_dot_product_policy();
  } else if (policy == "clustering") {
    current_policy_state_->policy = make_clustering_policy();
  } else if (policy == "packing") {
    current_policy_state_->policy = make_packing_policy();
  } else if (policy == "bestfit") {
    current_policy_state_->policy = make_best_fit_policy();
  } else if (policy == "fgd") {
    current_policy_state_->policy = make_fgd_policy(std::move(typical));
  } else if (policy == "supply") {
    replace_policy_state();
  } else if (policy == "random") {
    chooses_randomly_ = true;
  } else {
    throw UsageError("unknown placement policy '" + policy + "'");
  }
}

void Placer::record_request_arrival(int request_class, uint32_t tenant) {
  const RequestClass& request = cluster_.request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  if (uses_precompute_) {
    current_policy_state_->evaluation_cache.add_request_class(cluster_, request_class, tenant);
    if (next_policy_state_ != nullptr)
      next_policy_state_->evaluation_cache.add_request_class(cluster_, request_class, tenant);
  }
  if (current_policy_state_->supply_policy == nullptr) return;
  if (request_history_.size() < kHistoryRequestsMax) request_history_.emplace_back();
  RequestClass& remembered = request_history_[observed_request_count_ % kHistoryRequestsMax];
  remembered = request.without_node_constraints();
  ++observed_request_count_;
}

std::optional<NodeChoice> Placer::choose_node(int request_class, uint32_t tenant, std::optional<int> among) {
  const RequestClass& request = cluster_.request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  if (chooses_randomly_) return choose_random_node(request, tenant, allowed);
  replace_policy_state_if_overdue();
  return current_policy_state_->evaluation_cache.find_best_node(cluster_, *current_policy_state_->policy,
                                                                request_class, tenant, allowed);
}

std::optional<NodeChoice> Placer::choose_and_allocate(int request_class, uint32_t tenant,
                                                      std::optional<int> among) {
  const std::optional<NodeChoice> chosen = choose_node(request_class, tenant, among);
  if (chosen) cluster_.allocate_resources(chosen->node, request_class, tenant, chosen->gpus);
  return chosen;
}

std::optional<std::vector<NodeChoice>> Placer::place_gang(const Gang& gang,
                                                          const std::optional<std::vector<int>>& domains,
                                                          std::optional<int> among) {
  cluster_.request_class(gang.request_class);
  if (gang.tenant == 0) throw UsageError("a tenant must be a number from 1");
  if (gang.worker_count < 1 || gang.worker_count_min < 0 || gang.worker_count_min > gang.worker_count) {
    throw UsageError("a gang needs at least 1 worker, and a minimum that is not above its size");
  }
  if (chooses_randomly_) throw UsageError("the policy 'random' does not support gangs");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  std::vector<const NodeSet*> sets;
  if (domains) {
    for (int number : *domains) sets.push_back(&cluster_.node_set(number));
  } else {
    sets.push_back(nullptr);
  }
  replace_policy_state_if_overdue();
  ClassEvaluations& evaluations = current_policy_state_->evaluation_cache.get_updated_evaluations(
      cluster_, *current_policy_state_->policy, gang.request_class, gang.tenant);
  return GangPlacer(cluster_, *current_policy_state_->policy, evaluations, gang)
      .place_in_one_domain(sets, allowed);
}

void Placer::drop_request_class(int request_class) {
  cluster_.drop_request_class(request_class);
  current_policy_state_->evaluation_cache.drop_request_class(request_class);
  if (next_policy_state_ != nullptr) next_policy_state_->evaluation_cache.drop_request_class(request_class);
}

// With precompute(), updates are prepared there; if the calls stop, updates must still happen.
void Placer::replace_policy_state_if_overdue() {
  if (uses_precompute_ ? observed_request_count_ < next_learning_at_request_ + kLearningIntervalRequestsMax
                       : !update_supply_and_check_learning_due())
    return;
  replace_policy_state();
}

bool Placer::precompute(int64_t evaluations_max) {
  if (chooses_randomly_) return true;
  uses_precompute_ = true;
  WorkBudget budget(evaluations_max);
  return current_policy_state_->evaluation_cache.update_all_evaluations(
             cluster_, *current_policy_state_->policy, budget) &&
         prepare_next_policy_state(budget) && free_retired_policy_state(budget);
}

// The current state is used until the next one is complete.
bool Placer::prepare_next_policy_state(WorkBudget& budget) {
  SupplyPolicy* supply = current_policy_state_->supply_policy;
  if (supply == nullptr) return true;
  if (next_policy_state_ == nullptr) {
    if (observed_request_count_ < next_learning_at_request_) {
      if (!supply->update_supply(cluster_, budget)) return false;
      if (!supply->are_weights_stale()) return true;
    }
    if (budget.is_exhausted()) return false;
    next_policy_state_ = make_unprepared_policy_state();
    next_policy_state_->evaluation_cache.copy_classes_from(current_policy_state_->evaluation_cache);
    budget.charge(kLearningWorkUnits);
  }
  if (!next_policy_state_->supply_policy->update_supply_and_compute_weights(cluster_, budget)) return false;
  if (!next_policy_state_->evaluation_cache.update_all_evaluations(cluster_, *next_policy_state_->policy,
                                                                   budget))
    return false;
  // The state that was replaced before may not be freed yet: the assignment would do it at once.
  if (!free_retired_policy_state(budget)) return false;
  retired_policy_state_ = std::move(current_policy_state_);
  current_policy_state_ = std::move(next_policy_state_);
  return true;
}

bool Placer::free_retired_policy_state(WorkBudget& budget) {
  if (retired_policy_state_ == nullptr) return true;
  if (!retired_policy_state_->evaluation_cache.drop_all_classes(budget) || budget.is_exhausted())
    return false;
  retired_policy_state_.reset();
  return true;
}

bool Placer::update_supply_and_check_learning_due() {
  SupplyPolicy* supply = current_policy_state_->supply_policy;
  if (supply == nullptr) return false;
  if (observed_request_count_ >= next_learning_at_request_) return true;
  WorkBudget unlimited(kUnlimitedWorkUnits);
  supply->update_supply(cluster_, unlimited);
  return supply->are_weights_stale();
}

void Placer::replace_policy_state() {
  WorkBudget unlimited(kUnlimitedWorkUnits);
  current_policy_state_ = make_unprepared_policy_state();
  current_policy_state_->supply_policy->update_supply_and_compute_weights(cluster_, unlimited);
  next_policy_state_.reset();
}

std::unique_ptr<Placer::PolicyState> Placer::make_unprepared_policy_state() {
  auto state = std::make_unique<PolicyState>();
  std::unique_ptr<SupplyPolicy> supply;
  if (current_policy_state_->supply_policy != nullptr &&
      observed_request_count_ < next_learning_at_request_) {
    supply = std::make_unique<SupplyPolicy>(*current_policy_state_->supply_policy);
  } else {
    while (next_learning_at_request_ <= observed_request_count_)
      next_learning_at_request_ += std::min(next_learning_at_request_, kLearningIntervalRequestsMax);
    const auto oldest = request_history_.begin() +
                        (request_history_.empty() ? 0 : observed_request_count_ % request_history_.size());
    std::vector<RequestClass> history(oldest, request_history_.end());
    history.insert(history.end(), request_history_.begin(), oldest);
    supply = std::make_unique<SupplyPolicy>(cluster_, history, supply_options_);
  }
  state->supply_policy = supply.get();
  state->policy = std::move(supply);
  return state;
}

std::optional<NodeChoice> Placer::choose_random_node(const RequestClass& request, uint32_t tenant,
                                                     const NodeSet* among) {
  // Reservoir sampling: the n-th node that fits replaces the chosen one with probability 1/n.
  std::optional<NodeChoice> chosen;
  uint64_t seen = 0;
  const int nodes = static_cast<int>(cluster_.nodes().size());
  for (int number = 0; number < nodes; ++number) {
    const Node& node = cluster_.nodes()[number];
    if (among != nullptr && !among->contains(number)) continue;
    if (!fits_except_gpus(node, number, request)) continue;
    const GpuMask gpus = choose_tightest_gpus(node, request, tenant);
    if (request.gpu_count > 0 && gpus == 0) continue;
    if (random_.next() % ++seen == 0) chosen = NodeChoice{number, gpus};
  }
  if (!chosen || request.gpu_count != 1 || !request.requests_gpu_fraction()) return chosen;
  const Node& node = cluster_.nodes()[chosen->node];
  seen = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_on_gpu(node, g, request, tenant)) continue;
    if (random_.next() % ++seen == 0) chosen->gpus = static_cast<GpuMask>(1 << g);
  }
  return chosen;
}

}  // namespace genie
