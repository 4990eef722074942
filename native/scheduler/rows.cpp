#include "rows.h"

#include <algorithm>
#include <limits>

namespace genie {
namespace {

constexpr double kNowhere = std::numeric_limits<double>::infinity();
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

}  // namespace

std::optional<Choice> Rows::best(const Cluster& cluster, Policy& policy, int request_class, uint32_t tenant) {
  Row& row = row_for(cluster, request_class, tenant);
  int64_t budget = kUnlimited;
  catch_up(row, cluster, policy, budget);
  int best = -1;
  for (int node : row.block_best) {
    if (best < 0 || is_better(row, node, best)) best = node;
  }
  if (best < 0 || row.cost[best] == kNowhere) return std::nullopt;
  return Choice{best, row.gpus[best]};
}

bool Rows::refresh(const Cluster& cluster, Policy& policy, int64_t& budget) {
  for (auto& [key, row] : rows_) {
    if (!catch_up(row, cluster, policy, budget)) return false;
  }
  return true;
}

void Rows::open_rows_of(const Rows& other) {
  for (const auto& [key, row] : other.rows_) {
    Row& opened = rows_[key];
    opened.request_class = row.request_class;
    opened.tenant = row.tenant;
    opened.used = row.used;
  }
  uses_ = other.uses_;
}

Rows::Row& Rows::row_for(const Cluster& cluster, int request_class, uint32_t tenant) {
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

void Rows::drop_oldest() {
  const auto older = [](const auto& a, const auto& b) { return a.second.used < b.second.used; };
  rows_.erase(std::min_element(rows_.begin(), rows_.end(), older));
}

bool Rows::catch_up(Row& row, const Cluster& cluster, Policy& policy, int64_t& budget) {
  const int nodes = static_cast<int>(cluster.nodes().size());
  if (row.read < cluster.changes_kept_from()) row.judged_up_to = 0;
  if (row.judged_up_to == 0) row.read = cluster.changes();
  if (static_cast<int>(row.cost.size()) < nodes) {
    row.cost.resize(nodes, kNowhere);
    row.tie.resize(nodes);
    row.gpus.resize(nodes);
    row.block_best.resize((nodes + kBlock - 1) / kBlock);
    for (size_t block = 0; block < row.block_best.size(); ++block)
      find_block_best(row, static_cast<int>(block));
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
  const RequestClass& wanted = cluster.classes()[row.request_class];
  const std::optional<Candidate> found = policy.judge(cluster, node, wanted, row.tenant);
  if (!found && row.cost[node] == kNowhere) return;
  row.cost[node] = found ? found->cost : kNowhere;
  row.tie[node] = found ? found->tie : 0;
  row.gpus[node] = found ? found->gpus : uint16_t{0};
  const int block = node / kBlock;
  if (row.block_best[block] == node) {
    find_block_best(row, block);
  } else if (is_better(row, node, row.block_best[block])) {
    row.block_best[block] = node;
  }
}

bool Rows::is_better(const Row& row, int one, int other) {
  if (row.cost[one] != row.cost[other]) return row.cost[one] < row.cost[other];
  return row.tie[one] != row.tie[other] ? row.tie[one] < row.tie[other] : one < other;
}

void Rows::find_block_best(Row& row, int block) {
  const int end = std::min<int>((block + 1) * kBlock, static_cast<int>(row.cost.size()));
  int best = block * kBlock;
  for (int node = best + 1; node < end; ++node) {
    if (is_better(row, node, best)) best = node;
  }
  row.block_best[block] = best;
}

}  // namespace genie
