#include "placement.h"

#include <algorithm>
#include <bit>

#include "gpus.h"

namespace genie {
namespace {

constexpr size_t kHistoryLength = 200;  // requests to learn from
constexpr uint64_t kFirstUpdate = 25;   // requests; the interval doubles up to kUpdateEvery
constexpr uint64_t kUpdateEvery = 200;
constexpr int64_t kLearningWork = 2000;  // of begin_learning(), see WorkBudget

}  // namespace

Placement::Placement(const std::string& policy, uint64_t seed, std::vector<TypicalShape> typical,
                     const SupplyOptions& options)
    : options_(options), update_due_(kFirstUpdate), random_source_(seed) {
  current_ = std::make_unique<LearnedState>();
  if (policy == "dotprod") {
    current_->policy = make_dotprod();
  } else if (policy == "clustering") {
    current_->policy = make_clustering();
  } else if (policy == "packing") {
    current_->policy = make_packing();
  } else if (policy == "bestfit") {
    current_->policy = make_bestfit();
  } else if (policy == "fgd") {
    current_->policy = make_fgd(std::move(typical));
  } else if (policy == "supply") {
    learn();
  } else if (policy == "random") {
    is_random_ = true;
  } else {
    throw UsageError("unknown placement policy '" + policy + "'");
  }
}

void Placement::observe(int request_class, uint32_t tenant) {
  const RequestClass& request = cluster_.request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  if (is_refreshed_) {
    current_->cache.prepare(cluster_, request_class, tenant);
    if (next_ != nullptr) next_->cache.prepare(cluster_, request_class, tenant);
  }
  if (current_->supply == nullptr) return;
  if (history_.size() < kHistoryLength) history_.emplace_back();
  RequestClass& remembered = history_[observed_ % kHistoryLength];
  remembered = request.without_node_constraints();
  ++observed_;
}

std::optional<Choice> Placement::choose(int request_class, uint32_t tenant, std::optional<int> among) {
  const RequestClass& request = cluster_.request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  if (is_random_) return choose_at_random(request, tenant, allowed);
  update_if_overdue();
  return current_->cache.best(cluster_, *current_->policy, request_class, tenant, allowed);
}

std::optional<Choice> Placement::place(int request_class, uint32_t tenant, std::optional<int> among) {
  const std::optional<Choice> chosen = choose(request_class, tenant, among);
  if (chosen) cluster_.take(chosen->node, request_class, tenant, chosen->gpus);
  return chosen;
}

std::optional<std::vector<Choice>> Placement::place_gang(const Gang& gang,
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
  update_if_overdue();
  ClassEvaluations& evaluations =
      current_->cache.current(cluster_, *current_->policy, gang.request_class, gang.tenant);
  return GangPlacer(cluster_, *current_->policy, evaluations, gang).place(sets, allowed);
}

void Placement::drop_class(int request_class) {
  cluster_.drop_class(request_class);
  current_->cache.drop_class(request_class);
  if (next_ != nullptr) next_->cache.drop_class(request_class);
}

// With refresh(), updates are prepared there; if the calls stop, updates must still happen.
void Placement::update_if_overdue() {
  if (is_refreshed_ ? observed_ < update_due_ + kUpdateEvery : !is_update_due()) return;
  learn();
}

bool Placement::refresh(int64_t units) {
  if (is_random_) return true;
  is_refreshed_ = true;
  WorkBudget budget(units);
  return current_->cache.refresh(cluster_, *current_->policy, budget) && refresh_policy(budget) &&
         free_retired(budget);
}

// The current state is used until the next one is complete.
bool Placement::refresh_policy(WorkBudget& budget) {
  SupplyPolicy* supply = current_->supply;
  if (supply == nullptr) return true;
  if (next_ == nullptr) {
    if (observed_ < update_due_) {
      if (!supply->update_supply(cluster_, budget)) return false;
      if (!supply->is_stale()) return true;
    }
    if (budget.is_exhausted()) return false;
    next_ = begin_learning();
    next_->cache.prepare_like(current_->cache);
    budget.charge(kLearningWork);
  }
  if (!next_->supply->prepare(cluster_, budget)) return false;
  if (!next_->cache.refresh(cluster_, *next_->policy, budget)) return false;
  retired_ = std::move(current_);
  current_ = std::move(next_);
  return true;
}

bool Placement::free_retired(WorkBudget& budget) {
  if (retired_ == nullptr) return true;
  if (!retired_->cache.clear(budget) || budget.is_exhausted()) return false;
  retired_.reset();
  return true;
}

bool Placement::is_update_due() {
  SupplyPolicy* supply = current_->supply;
  if (supply == nullptr) return false;
  if (observed_ >= update_due_) return true;
  WorkBudget unlimited(kUnlimited);
  supply->update_supply(cluster_, unlimited);
  return supply->is_stale();
}

void Placement::learn() {
  WorkBudget unlimited(kUnlimited);
  current_ = begin_learning();
  current_->supply->prepare(cluster_, unlimited);
  next_.reset();
}

std::unique_ptr<Placement::LearnedState> Placement::begin_learning() {
  auto state = std::make_unique<LearnedState>();
  std::unique_ptr<SupplyPolicy> supply;
  if (current_->supply != nullptr && observed_ < update_due_) {
    supply = std::make_unique<SupplyPolicy>(*current_->supply);
  } else {
    while (update_due_ <= observed_) update_due_ += std::min(update_due_, kUpdateEvery);
    const auto oldest = history_.begin() + (history_.empty() ? 0 : observed_ % history_.size());
    std::vector<RequestClass> history(oldest, history_.end());
    history.insert(history.end(), history_.begin(), oldest);
    supply = std::make_unique<SupplyPolicy>(cluster_, history, options_);
  }
  state->supply = supply.get();
  state->policy = std::move(supply);
  return state;
}

std::optional<Choice> Placement::choose_at_random(const RequestClass& request, uint32_t tenant,
                                                  const NodeSet* among) {
  // Reservoir sampling: the n-th node that fits replaces the chosen one with probability 1/n.
  std::optional<Choice> chosen;
  uint64_t seen = 0;
  const int nodes = static_cast<int>(cluster_.nodes().size());
  for (int number = 0; number < nodes; ++number) {
    const Node& node = cluster_.nodes()[number];
    if (among != nullptr && !among->has(number)) continue;
    if (!fits_except_gpus(node, number, request)) continue;
    const uint16_t gpus = tightest_gpus(node, request, tenant);
    if (request.gpus > 0 && gpus == 0) continue;
    if (random_source_.next() % ++seen == 0) chosen = Choice{number, gpus};
  }
  if (!chosen || request.gpus != 1 || !request.is_fraction()) return chosen;
  const Node& node = cluster_.nodes()[chosen->node];
  seen = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_gpu(node, g, request, tenant)) continue;
    if (random_source_.next() % ++seen == 0) chosen->gpus = static_cast<uint16_t>(1 << g);
  }
  return chosen;
}

}  // namespace genie
