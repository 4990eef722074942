#include "gang.h"

#include <algorithm>
#include <array>
#include <bit>

namespace genie {
namespace {

// Maps costs to integers of the same order; -0 equals 0.
uint64_t to_sortable_bits(double cost) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  const auto bits = std::bit_cast<uint64_t>(cost + 0.0);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// A node that fits a worker, with its evaluation as integers that compare without branches, which would be
// mispredicted.
struct FittingNode {
  uint64_t cost;
  uint64_t tie_breaker;
  int node;
  uint16_t gpus;

  bool operator<(const FittingNode& other) const {
    const bool is_first =
        (tie_breaker < other.tie_breaker) | ((tie_breaker == other.tie_breaker) & (node < other.node));
    return (cost < other.cost) | ((cost == other.cost) & is_first);
  }
};

}  // namespace

GangPlacer::GangPlacer(Cluster& cluster, Policy& policy, ClassEvaluations& evaluations, const Gang& gang)
    : cluster_(cluster),
      policy_(policy),
      evaluations_(evaluations),
      gang_(gang),
      block_count_(static_cast<int>(evaluations.best_by_block.size())) {
  if (!gang.spread) EvaluationCache::compute_capacity(evaluations, cluster);
}

std::optional<std::vector<NodeChoice>> GangPlacer::place(const std::vector<const NodeSet*>& domains,
                                                         const NodeSet* among) {
  std::vector<DomainCapacity> order;
  for (int index = 0; index < static_cast<int>(domains.size()); ++index) {
    const int64_t capacity = capacity_of_domain(domains[index], among);
    if (capacity >= gang_.required_workers()) order.push_back({capacity, index});
  }
  std::sort(order.begin(), order.end());
  for (const DomainCapacity& domain : order) {
    if (domain.capacity < gang_.workers) continue;
    place_up_to(domains[domain.index], among, gang_.workers);
    if (static_cast<int>(choices_.size()) == gang_.workers) return std::move(choices_);
    release_all();
  }
  if (gang_.required_workers() == gang_.workers) return std::nullopt;
  int most = 0;
  int where = -1;
  for (auto domain = order.rbegin(); domain != order.rend() && domain->capacity >= most; ++domain) {
    place_up_to(domains[domain->index], among, gang_.workers);
    if (static_cast<int>(choices_.size()) >= most) {
      most = static_cast<int>(choices_.size());
      where = domain->index;
    }
    release_all();
  }
  if (most < gang_.required_workers()) return std::nullopt;
  place_up_to(domains[where], among, most);
  return std::move(choices_);
}

uint64_t GangPlacer::node_mask(const NodeSet* domain, const NodeSet* among, int block) {
  const uint64_t word = domain != nullptr ? domain->mask_of_block(block) : ~uint64_t{0};
  return among != nullptr ? word & among->mask_of_block(block) : word;
}

int64_t GangPlacer::capacity_of_domain(const NodeSet* domain, const NodeSet* among) const {
  int64_t capacity = 0;
  for (int block = 0; block < block_count_; ++block) {
    if (!evaluations_.best_by_block[block].fits()) continue;
    for (uint64_t left = node_mask(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kNodesPerBlock + std::countr_zero(left);
      capacity += gang_.spread ? static_cast<int>(evaluations_.evaluation_of(node).fits())
                               : evaluations_.capacity[node];
    }
  }
  return capacity;
}

// Does not update the evaluations: only nodes that get workers change, and those are evaluated here.
void GangPlacer::place_up_to(const NodeSet* domain, const NodeSet* among, int workers) {
  const RequestClass& request = cluster_.request_class(gang_.request_class);
  std::array<FittingNode, kNodesPerBlock> fitting;  // in one block
  std::vector<FittingNode> open;
  for (int block = 0; block < block_count_; ++block) {
    if (!evaluations_.best_by_block[block].fits()) continue;
    size_t count = 0;
    for (uint64_t left = node_mask(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kNodesPerBlock + std::countr_zero(left);
      fitting[count] = {to_sortable_bits(evaluations_.cost[node]), evaluations_.tie_breaker[node], node,
                        evaluations_.gpus[node]};
      count += static_cast<size_t>(evaluations_.evaluation_of(node).fits());
    }
    open.insert(open.end(), fitting.begin(), fitting.begin() + static_cast<std::ptrdiff_t>(count));
  }
  const auto most = static_cast<size_t>(workers);
  if (open.size() > most) {  // each holds at least one
    std::nth_element(open.begin(), open.begin() + workers, open.end());
    open.resize(most);
  }
  std::sort(open.begin(), open.end());
  std::vector<FittingNode> reusable;  // nodes that got a worker and fit another
  choices_.clear();
  choices_.reserve(most);
  for (auto next = open.begin(); choices_.size() < most;) {
    const auto used = std::min_element(reusable.begin(), reusable.end());
    const bool is_used = used != reusable.end() && (next == open.end() || *used < *next);
    if (!is_used && next == open.end()) return;
    const FittingNode best = is_used ? *used : *next;
    if (is_used) {
      reusable.erase(used);
    } else {
      ++next;
    }
    choices_.push_back({best.node, best.gpus});
    cluster_.take(best.node, gang_.request_class, gang_.tenant, best.gpus);
    if (gang_.spread) continue;
    const std::optional<Candidate> found =
        policy_.evaluate(cluster_, best.node, request, evaluations_.tenant);
    if (found)
      reusable.push_back({to_sortable_bits(found->cost), found->tie_breaker, best.node, found->gpus});
  }
}

void GangPlacer::release_all() {
  for (auto place = choices_.rbegin(); place != choices_.rend(); ++place) {
    cluster_.release(place->node, gang_.request_class, place->gpus);
  }
  choices_.clear();
}

}  // namespace genie
