#include "rows.h"

#include <algorithm>
#include <array>
#include <bit>

#include "gpus.h"

namespace genie {
namespace {

constexpr double kNowhere = std::numeric_limits<double>::infinity();
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

}  // namespace

// First the least cost, without a branch, then who has it.
Judged Row::best_of(int block) const {
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

Judged Row::best_of(int block, uint64_t among) const {
  Judged best = block_best[block];
  if (!best.fits() || (among >> (best.node % kBlock) & 1) != 0) return best;
  best = {};
  for (; among != 0; among &= among - 1) {
    const Judged other = at(block * kBlock + std::countr_zero(among));
    if (other.fits() && other.is_better(best)) best = other;
  }
  return best;
}

std::optional<Choice> Rows::best(const Cluster& cluster, Policy& policy, int request_class, uint32_t tenant,
                                 const NodeSet* among) {
  const Row& row = current(cluster, policy, request_class, tenant);
  Judged best;
  for (int block = 0; block < static_cast<int>(row.block_best.size()); ++block) {
    if (!row.block_best[block].is_better(best)) continue;
    const Judged found = among == nullptr ? row.block_best[block] : row.best_of(block, among->word(block));
    if (found.fits() && found.is_better(best)) best = found;
  }
  if (!best.fits()) return std::nullopt;
  return Choice{best.node, row.gpus[best.node]};
}

Row& Rows::current(const Cluster& cluster, Policy& policy, int request_class, uint32_t tenant) {
  Row& row = row_for(cluster, request_class, tenant);
  catch_up(row, cluster, policy);
  return row;
}

void Rows::count_room(Row& row, const Cluster& cluster) {
  if (row.counts_room) return;
  row.counts_room = true;
  row.room.assign(row.cost.size(), 0);
  const RequestClass& wanted = cluster.request_class(row.request_class);
  for (int node = 0; node < static_cast<int>(row.cost.size()); ++node) {
    if (row.at(node).fits()) row.room[node] = room_on(cluster.nodes()[node], wanted, row.tenant);
  }
}

bool Rows::refresh(const Cluster& cluster, Policy& policy, int64_t& budget) {
  Row* latest = nullptr;
  for (auto& [key, row] : rows_) {
    if (row.used == uses_) {
      latest = &row;
    } else if (!catch_up(row, cluster, policy, budget)) {
      return false;
    }
  }
  // What was asked for last is likely to be decided next: it, and the nodes that changed, stay in the cache.
  return latest == nullptr || catch_up(*latest, cluster, policy, budget);
}

void Rows::open_rows_of(const Rows& other) {
  for (const auto& [key, row] : other.rows_) {
    Row& opened = rows_[key];
    opened.request_class = row.request_class;
    opened.tenant = row.tenant;
    opened.used = row.used;
    opened.counts_room = row.counts_room;
  }
  uses_ = other.uses_;
}

Row& Rows::row_for(const Cluster& cluster, int request_class, uint32_t tenant) {
  // Only fractions can meet another tenant's.
  const uint32_t seen_as = cluster.request_class(request_class).is_fraction() ? tenant : 1;
  const uint64_t key = uint64_t{static_cast<uint32_t>(request_class)} << 32 | seen_as;
  auto found = rows_.find(key);
  if (found == rows_.end()) {
    if (rows_.size() >= kRowsMax) drop_oldest();
    found = rows_.try_emplace(key).first;
    found->second.request_class = request_class;
    found->second.tenant = seen_as;
  }
  found->second.used = ++uses_;
  return found->second;
}

void Rows::drop_class(int request_class) {
  std::erase_if(rows_, [&](const auto& item) { return item.second.request_class == request_class; });
}

void Rows::drop_oldest() {
  const auto older = [](const auto& a, const auto& b) { return a.second.used < b.second.used; };
  rows_.erase(std::min_element(rows_.begin(), rows_.end(), older));
}

void Rows::catch_up(Row& row, const Cluster& cluster, Policy& policy) {
  int64_t budget = kUnlimited;
  catch_up(row, cluster, policy, budget);
}

bool Rows::catch_up(Row& row, const Cluster& cluster, Policy& policy, int64_t& budget) {
  const int nodes = static_cast<int>(cluster.nodes().size());
  if (row.read < cluster.changes_kept_from()) row.judged_up_to = 0;
  if (row.judged_up_to == 0) row.read = cluster.changes();
  if (static_cast<int>(row.cost.size()) < nodes) {
    const auto blocks = static_cast<size_t>(nodes + kBlock - 1) / kBlock;
    row.cost.resize(blocks * kBlock, kNowhere);
    row.tie.resize(blocks * kBlock);
    row.gpus.resize(blocks * kBlock);
    if (row.counts_room) row.room.resize(blocks * kBlock);
    // A new block's first node is as good as any: none of them fits yet.
    for (size_t block = row.block_best.size(); block < blocks; ++block) {
      row.block_best.push_back(row.at(static_cast<int>(block) * kBlock));
    }
  }
  for (; row.judged_up_to < nodes; ++row.judged_up_to) {
    if (budget-- <= 0) return false;
    judge(row, cluster, policy, row.judged_up_to);
  }
  for (; row.read < cluster.changes(); ++row.read) {
    if (budget-- <= 0) return false;
    judge(row, cluster, policy, cluster.changed(row.read));
  }
  return true;
}

void Rows::judge(Row& row, const Cluster& cluster, Policy& policy, int node) {
  const RequestClass& wanted = cluster.request_class(row.request_class);
  const std::optional<Candidate> found = policy.judge(cluster, node, wanted, row.tenant);
  if (!found && !row.at(node).fits()) return;
  row.cost[node] = found ? found->cost : kNowhere;
  row.tie[node] = found ? found->tie : 0;
  row.gpus[node] = found ? found->gpus : uint16_t{0};
  if (row.counts_room) row.room[node] = found ? room_on(cluster.nodes()[node], wanted, row.tenant) : 0;
  Judged& best = row.block_best[node / kBlock];
  if (best.node == node) {
    best = row.best_of(node / kBlock);
  } else if (row.at(node).is_better(best)) {
    best = row.at(node);
  }
}

}  // namespace genie
