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
  uint64_t sortable_cost;
  uint64_t tie_breaker;
  int node;
  GpuMask gpus;

  bool operator<(const FittingNode& other) const {
    const bool is_first =
        (tie_breaker < other.tie_breaker) | ((tie_breaker == other.tie_breaker) & (node < other.node));
    return (sortable_cost < other.sortable_cost) | ((sortable_cost == other.sortable_cost) & is_first);
  }
};

}  // namespace

GangPlacer::GangPlacer(Cluster& cluster, PlacementPolicy& policy, ClassEvaluations& evaluations,
                       const Gang& gang)
    : cluster_(cluster),
      policy_(policy),
      evaluations_(evaluations),
      gang_(gang),
      block_count_(static_cast<int>(evaluations.best_node_by_block.size())) {
  if (!gang.one_worker_per_node) EvaluationCache::start_tracking_capacity(evaluations, cluster);
}

std::optional<std::vector<NodeChoice>> GangPlacer::place_in_one_domain(
    const std::vector<const NodeSet*>& domains, const NodeSet* among) {
  std::vector<DomainCapacity> order;
  for (int index = 0; index < static_cast<int>(domains.size()); ++index) {
    const int64_t capacity = domain_capacity(domains[index], among);
    if (capacity >= gang_.required_worker_count()) order.push_back({capacity, index});
  }
  std::sort(order.begin(), order.end());
  for (const DomainCapacity& domain : order) {
    if (domain.capacity < gang_.worker_count) continue;
    place_workers_up_to(domains[domain.domain_index], among, gang_.worker_count);
    if (static_cast<int>(worker_choices_.size()) == gang_.worker_count) return std::move(worker_choices_);
    release_placed_workers();
  }
  if (gang_.required_worker_count() == gang_.worker_count) return std::nullopt;
  int most = 0;
  int where = -1;
  for (auto domain = order.rbegin(); domain != order.rend() && domain->capacity >= most; ++domain) {
    place_workers_up_to(domains[domain->domain_index], among, gang_.worker_count);
    if (static_cast<int>(worker_choices_.size()) >= most) {
      most = static_cast<int>(worker_choices_.size());
      where = domain->domain_index;
    }
    release_placed_workers();
  }
  if (most < gang_.required_worker_count()) return std::nullopt;
  place_workers_up_to(domains[where], among, most);
  return std::move(worker_choices_);
}

uint64_t GangPlacer::allowed_nodes_in_block(const NodeSet* domain, const NodeSet* among, int block) {
  const uint64_t word = domain != nullptr ? domain->mask_of_block(block) : ~uint64_t{0};
  return among != nullptr ? word & among->mask_of_block(block) : word;
}

int64_t GangPlacer::domain_capacity(const NodeSet* domain, const NodeSet* among) const {
  int64_t capacity = 0;
  for (int block = 0; block < block_count_; ++block) {
    if (!evaluations_.best_node_by_block[block].fits()) continue;
    for (uint64_t left = allowed_nodes_in_block(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kNodesPerBlock + std::countr_zero(left);
      capacity += gang_.one_worker_per_node ? static_cast<int>(evaluations_.evaluation_of(node).fits())
                                            : evaluations_.capacity_by_node[node];
    }
  }
  return capacity;
}

// Does not update the evaluations: only nodes that get workers change, and those are evaluated here.
void GangPlacer::place_workers_up_to(const NodeSet* domain, const NodeSet* among, int worker_count) {
  const RequestClass& request = cluster_.request_class(gang_.request_class);
  std::array<FittingNode, kNodesPerBlock> fitting;  // in one block
  std::vector<FittingNode> open;
  for (int block = 0; block < block_count_; ++block) {
    if (!evaluations_.best_node_by_block[block].fits()) continue;
    size_t count = 0;
    for (uint64_t left = allowed_nodes_in_block(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kNodesPerBlock + std::countr_zero(left);
      fitting[count] = {to_sortable_bits(evaluations_.cost_by_node[node]),
                        evaluations_.tie_breaker_by_node[node], node, evaluations_.gpus_by_node[node]};
      count += static_cast<size_t>(evaluations_.evaluation_of(node).fits());
    }
    open.insert(open.end(), fitting.begin(), fitting.begin() + static_cast<std::ptrdiff_t>(count));
  }
  const auto most = static_cast<size_t>(worker_count);
  if (open.size() > most) {  // each holds at least one
    std::nth_element(open.begin(), open.begin() + worker_count, open.end());
    open.resize(most);
  }
  std::sort(open.begin(), open.end());
  std::vector<FittingNode> reusable;  // nodes that got a worker and fit another
  worker_choices_.clear();
  worker_choices_.reserve(most);
  for (auto next = open.begin(); worker_choices_.size() < most;) {
    const auto used = std::min_element(reusable.begin(), reusable.end());
    const bool is_used = used != reusable.end() && (next == open.end() || *used < *next);
    if (!is_used && next == open.end()) return;
    const FittingNode best = is_used ? *used : *next;
    if (is_used) {
      reusable.erase(used);
    } else {
      ++next;
    }
    worker_choices_.push_back({best.node, best.gpus});
    cluster_.allocate_resources(best.node, gang_.request_class, gang_.tenant, best.gpus);
    if (gang_.one_worker_per_node) continue;
    const std::optional<PlacementCandidate> found =
        policy_.evaluate_node(cluster_, best.node, request, evaluations_.tenant);
    if (found)
      reusable.push_back({to_sortable_bits(found->cost), found->tie_breaker, best.node, found->gpus});
  }
}

void GangPlacer::release_placed_workers() {
  for (auto place = worker_choices_.rbegin(); place != worker_choices_.rend(); ++place) {
    cluster_.release_resources(place->node, gang_.request_class, place->gpus);
  }
  worker_choices_.clear();
}

}  // namespace genie
