#include "gang.h"

#include <algorithm>
#include <bit>

namespace genie {
namespace {

// A block of nodes that may be used, and the best of them.
struct Block {
  int number;
  uint64_t left;
  int best;
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
    if (!row_.fits(row_.block_best[block])) continue;
    for (uint64_t left = word(domain, among, block); left != 0; left &= left - 1) {
      const int node = block * kBlock + std::countr_zero(left);
      room += gang_.spread ? static_cast<int>(row_.fits(node)) : row_.room[node];
    }
  }
  return room;
}

void GangPlacer::fill(const NodeSet* domain, const NodeSet* among, int workers) {
  std::vector<Block> blocks;
  for (int number = 0; number < blocks_; ++number) {
    const uint64_t left = word(domain, among, number);
    const int best = left == 0 ? -1 : row_.best_of(number, left);
    if (best >= 0) blocks.push_back({number, left, best});
  }
  places_.clear();
  places_.reserve(workers);
  while (static_cast<int>(places_.size()) < workers) {
    Block* best = nullptr;
    for (Block& block : blocks) {
      if (block.best >= 0 && (best == nullptr || row_.is_better(block.best, best->best))) best = &block;
    }
    if (best == nullptr) return;
    places_.push_back({best->best, row_.gpus[best->best]});
    cluster_.take(best->best, gang_.request_class, gang_.tenant, places_.back().gpus);
    if (gang_.spread) best->left &= ~(uint64_t{1} << best->best % kBlock);
    Rows::catch_up(row_, cluster_, policy_);
    best->best = row_.best_of(best->number, best->left);
  }
}

void GangPlacer::give_back() {
  for (auto place = places_.rbegin(); place != places_.rend(); ++place) {
    cluster_.release(place->node, gang_.request_class, place->gpus);
  }
  places_.clear();
  Rows::catch_up(row_, cluster_, policy_);
}

}  // namespace genie
