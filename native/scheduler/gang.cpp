#include "gang.h"

#include <algorithm>
#include <bit>

namespace genie {
namespace {

// A block of nodes that may be used, and the best of them.
struct Block {
  int number;
  uint64_t left;
  Judged best;
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

void GangPlacer::fill(const NodeSet* domain, const NodeSet* among, int workers) {
  std::vector<Block> blocks;
  for (int number = 0; number < blocks_; ++number) {
    const uint64_t left = word(domain, among, number);
    if (left == 0) continue;
    const Judged best = row_.best_of(number, left);
    if (best.fits()) blocks.push_back({number, left, best});
  }
  places_.clear();
  places_.reserve(workers);
  while (static_cast<int>(places_.size()) < workers) {
    const auto better = [](const Block& one, const Block& other) { return one.best.is_better(other.best); };
    const auto block = std::min_element(blocks.begin(), blocks.end(), better);
    if (block == blocks.end() || !block->best.fits()) return;
    const int node = block->best.node;
    places_.push_back({node, row_.gpus[node]});
    cluster_.take(node, gang_.request_class, gang_.tenant, places_.back().gpus);
    if (gang_.spread) block->left &= ~(uint64_t{1} << node % kBlock);
    Rows::catch_up(row_, cluster_, policy_);
    block->best = row_.best_of(block->number, block->left);
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
