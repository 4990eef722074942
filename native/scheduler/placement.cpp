#include "placement.h"

#include <algorithm>
#include <bit>

#include "gpus.h"

namespace genie {
namespace {

constexpr size_t kHistory = 200;       // requests that are remembered
constexpr uint64_t kFirstLesson = 25;  // after so many requests; then twice as many, up to kLessonEvery
constexpr uint64_t kLessonEvery = 200;

}  // namespace

Placement::Placement(const std::string& policy, uint64_t seed, std::vector<TypicalShape> typical,
                     const SupplyOptions& options)
    : options_(options), due_(kFirstLesson), dice_(seed) {
  lesson_ = std::make_unique<Lesson>();
  if (policy == "dotprod") {
    lesson_->policy = make_dotprod();
  } else if (policy == "clustering") {
    lesson_->policy = make_clustering();
  } else if (policy == "packing") {
    lesson_->policy = make_packing();
  } else if (policy == "bestfit") {
    lesson_->policy = make_bestfit();
  } else if (policy == "fgd") {
    lesson_->policy = make_fgd(std::move(typical));
  } else if (policy == "supply") {
    lesson_ = learn();
  } else if (policy == "random") {
    random_ = true;
  } else {
    throw Misuse("there is no policy '" + policy + "'");
  }
}

void Placement::observe(int request_class, uint32_t tenant) {
  const RequestClass& wanted = cluster_.request_class(request_class);
  if (tenant == 0) throw Misuse("tenants are numbers from 1");
  if (is_refreshed_) {
    lesson_->rows.open(cluster_, request_class, tenant);
    if (next_ != nullptr) next_->rows.open(cluster_, request_class, tenant);
  }
  if (lesson_->supply == nullptr) return;
  if (history_.size() < kHistory) history_.emplace_back();
  RequestClass& remembered = history_[observed_ % kHistory];
  remembered = wanted.without_places();
  ++observed_;
}

std::optional<Choice> Placement::choose(int request_class, uint32_t tenant, std::optional<int> among) {
  const RequestClass& wanted = cluster_.request_class(request_class);
  if (tenant == 0) throw Misuse("tenants are numbers from 1");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  if (random_) return choose_at_random(wanted, tenant, allowed);
  learn_if_late();
  return lesson_->rows.best(cluster_, *lesson_->policy, request_class, tenant, allowed);
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
  if (gang.tenant == 0) throw Misuse("tenants are numbers from 1");
  if (gang.workers < 1 || gang.workers_min < 0 || gang.workers_min > gang.workers) {
    throw Misuse("a gang has 1 worker at least, and its minimum is not above its number");
  }
  if (random_) throw Misuse("the policy 'random' places no gangs");
  const NodeSet* allowed = among ? &cluster_.node_set(*among) : nullptr;
  std::vector<const NodeSet*> sets;
  if (domains) {
    for (int number : *domains) sets.push_back(&cluster_.node_set(number));
  } else {
    sets.push_back(nullptr);
  }
  learn_if_late();
  Row& row = lesson_->rows.current(cluster_, *lesson_->policy, gang.request_class, gang.tenant);
  return GangPlacer(cluster_, *lesson_->policy, row, gang).place(sets, allowed);
}

void Placement::drop_class(int request_class) {
  cluster_.drop_class(request_class);
  lesson_->rows.drop_class(request_class);
  if (next_ != nullptr) next_->rows.drop_class(request_class);
}

// Whoever refreshes has lessons prepared there; if that stops, old lessons must not last for ever.
void Placement::learn_if_late() {
  if (is_refreshed_ ? observed_ < due_ + kLessonEvery : !is_lesson_due()) return;
  lesson_ = learn();
  next_.reset();
}

bool Placement::refresh(int64_t budget) {
  if (random_) return true;
  is_refreshed_ = true;
  if (next_ == nullptr && is_lesson_due()) {
    next_ = learn();
    next_->rows.open_rows_of(lesson_->rows);
  }
  // The old rows decide until the new ones are complete.
  if (!lesson_->rows.refresh(cluster_, *lesson_->policy, budget)) return false;
  if (next_ == nullptr) return true;
  if (!next_->rows.refresh(cluster_, *next_->policy, budget)) return false;
  lesson_ = std::move(next_);
  return true;
}

bool Placement::is_lesson_due() {
  Supply* supply = lesson_->supply;
  return supply != nullptr && (observed_ >= due_ || supply->is_stale(cluster_));
}

std::unique_ptr<Placement::Lesson> Placement::learn() {
  auto lesson = std::make_unique<Lesson>();
  std::unique_ptr<Supply> supply;
  if (lesson_->supply != nullptr && observed_ < due_) {
    supply = std::make_unique<Supply>(cluster_, *lesson_->supply);
  } else {
    while (due_ <= observed_) due_ += std::min(due_, kLessonEvery);
    const auto oldest = history_.begin() + (history_.empty() ? 0 : observed_ % history_.size());
    std::vector<RequestClass> history(oldest, history_.end());
    history.insert(history.end(), history_.begin(), oldest);
    supply = std::make_unique<Supply>(cluster_, history, options_);
  }
  lesson->supply = supply.get();
  lesson->policy = std::move(supply);
  return lesson;
}

std::optional<Choice> Placement::choose_at_random(const RequestClass& wanted, uint32_t tenant,
                                                  const NodeSet* among) {
  // One of those that fit, each as likely as any: the n-th replaces the chosen one with a chance of 1/n.
  std::optional<Choice> chosen;
  uint64_t seen = 0;
  const int nodes = static_cast<int>(cluster_.nodes().size());
  for (int number = 0; number < nodes; ++number) {
    const Node& node = cluster_.nodes()[number];
    if (among != nullptr && !among->has(number)) continue;
    if (!fits_beside_gpus(node, number, wanted)) continue;
    const uint16_t gpus = tightest_gpus(node, wanted, tenant);
    if (wanted.gpus > 0 && gpus == 0) continue;
    if (dice_.roll() % ++seen == 0) chosen = Choice{number, gpus};
  }
  if (!chosen || wanted.gpus != 1 || !wanted.is_fraction()) return chosen;
  const Node& node = cluster_.nodes()[chosen->node];
  seen = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_gpu(node, g, wanted, tenant)) continue;
    if (dice_.roll() % ++seen == 0) chosen->gpus = static_cast<uint16_t>(1 << g);
  }
  return chosen;
}

}  // namespace genie
