#include "gang.h"

#include <algorithm>
#include <array>
#include <bit>

namespace genie {
namespace {

// In the order of the doubles, of which -0 and 0 are one.
uint64_t ordered(double cost) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  const auto bits = std::bit_cast<uint64_t>(cost + 0.0);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// A node that can take a worker, and its judgement as numbers that compare without a branch: which of two
// nodes is the better one cannot be guessed.
struct Open {
  uint64_t cost;
  uint64_t tie;
  int node;
  uint16_t gpus;

  bool operator<(const Open& other) const {
    const bool sooner = (tie < other.tie) | ((tie == other.tie) & (node < other.node));
    return (cost < other.cost) | ((cost == other.cost) & sooner);
  }
};

}  // namespace

GangPlacer::GangPlacer(Cluster& cluster, Policy& policy, Row& row, const Gang& gang)
    : cluster_(cluster),
      policy_(policy),
      row_(row),
      gang_(gang),
      blocks_(static_cast<int>(row.block_best.size())) {
  if (!gang.spread) Rows::count_room(row, cluster);
}

std::optional<std::vector<Choice>> GangPlacer::place(const std::vector<const NodeSet*>& domains,
                                                     const NodeSet* among) {
  std::vector<Domain> order;
  for (int index = 0; index < static_cast<int>(domains.size()); ++index) {
    const int64_t room = room_in(domains[index], among);
    if (room >= gang_.least()) order.push_back({room, index});
  }
  std::sort(order.begin(), order.end());
  for (const Domain& domain : order) {
    if (domain.room < gang_.workers) continue;
    fill(domains[domain.index], among, gang_.workers);
    if (static_cast<int>(places_.size()) == gang_.workers) return std::move(places_);
    give_back();
  }
  if (gang_.least() == gang_.workers) return std::nullopt;
  int most = 0;
  int where = -1;
  for (auto domain = order.rbegin(); domain != order.rend() && domain->room >= most; ++domain) {
    fill(domains[domain->index], among, gang_.workers);
    if (static_cast<int>(places_.size()) >= most) {
      most = static_cast<int>(places_.size());
      where = domain->index;
    }
    give_back();
  }
  if (most < gang_.least()) return std::nullopt;
  fill(domains[where], among, most);
  return std::move(places_);
}

uint64_t GangPlacer::word(const NodeSet* domain, const NodeSet* among, int block) {
  const uint64_t word = domain != nullptr ? domain->word(block) : ~uint64_t{0};
  return among != nullptr ? word & among->word(block) : word;
}

int64_t GangPlacer::room_in(const NodeSet* domain, const NodeSet* among) const {
  int64_t room = 0;
  for (int block = 0; block < blocks_; ++block) {
    if (!row_.block_best[block].fits()) continue;
    for (uint64_t left = word(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kBlock + std::countr_zero(left);
      room += gang_.spread ? static_cast<int>(row_.at(node).fits()) : row_.room[node];
    }
  }
  return room;
}

// The row is left as it is: only nodes that take workers change, and those are judged here. It catches up
// when it is asked again.
void GangPlacer::fill(const NodeSet* domain, const NodeSet* among, int workers) {
  const RequestClass& wanted = cluster_.request_class(gang_.request_class);
  std::array<Open, kBlock> fitting;  // of a block
  std::vector<Open> open;
  for (int block = 0; block < blocks_; ++block) {
    if (!row_.block_best[block].fits()) continue;
    size_t count = 0;
    for (uint64_t left = word(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kBlock + std::countr_zero(left);
      fitting[count] = {ordered(row_.cost[node]), row_.tie[node], node, row_.gpus[node]};
      count += static_cast<size_t>(row_.at(node).fits());
    }
    open.insert(open.end(), fitting.begin(), fitting.begin() + static_cast<std::ptrdiff_t>(count));
  }
  const auto most = static_cast<size_t>(workers);
  if (open.size() > most) {  // each takes one at least
    std::nth_element(open.begin(), open.begin() + workers, open.end());
    open.resize(most);
  }
  std::sort(open.begin(), open.end());
  std::vector<Open> again;  // have taken one, and could take another
  places_.clear();
  places_.reserve(most);
  for (auto next = open.begin(); places_.size() < most;) {
    const auto used = std::min_element(again.begin(), again.end());
    const bool is_used = used != again.end() && (next == open.end() || *used < *next);
    if (!is_used && next == open.end()) return;
    const Open best = is_used ? *used : *next;
    if (is_used) {
      again.erase(used);
    } else {
      ++next;
    }
    places_.push_back({best.node, best.gpus});
    cluster_.take(best.node, gang_.request_class, gang_.tenant, best.gpus);
    if (gang_.spread) continue;
    const std::optional<Candidate> found = policy_.judge(cluster_, best.node, wanted, row_.tenant);
    if (found) again.push_back({ordered(found->cost), found->tie, best.node, found->gpus});
  }
}

void GangPlacer::give_back() {
  for (auto place = places_.rbegin(); place != places_.rend(); ++place) {
    cluster_.release(place->node, gang_.request_class, place->gpus);
  }
  places_.clear();
}

}  // namespace genie
