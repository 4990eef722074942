// Every node's judgement for every request class in use, kept up to date change by change.
#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "policy.h"

namespace genie {

constexpr int kBlock = 64;  // nodes; as many as a word of a NodeSet has

struct Choice {
  int node;
  uint16_t gpus;
};

// A node's judgement.
struct Judged {
  double cost = std::numeric_limits<double>::infinity();  // that: it does not fit there
  uint64_t tie = 0;
  int node = -1;

  bool fits() const { return cost != std::numeric_limits<double>::infinity(); }
  bool is_better(const Judged& other) const {
    if (cost != other.cost) return cost < other.cost;
    return tie != other.tie ? tie < other.tie : node < other.node;
  }
};

// What one request class makes of the nodes.
struct Row {
  int request_class = 0;
  uint32_t tenant = 0;
  uint64_t used = 0;     // the higher, the later
  uint64_t read = 0;     // changes of the cluster that are in it
  int judged_up_to = 0;  // nodes below this one have been judged at all
  // For each node, up to whole blocks of them.
  std::vector<double> cost;
  std::vector<uint64_t> tie;
  std::vector<uint16_t> gpus;
  std::vector<Judged> block_best;  // the best node of each block, in one place to be looked through
  bool counts_room = false;        // since somebody asked
  std::vector<uint16_t> room;      // see room_on(); 0 where it does not fit

  Judged at(int node) const { return {cost[node], tie[node], node}; }
  // The best node of a block; one that does not fit when none does.
  Judged best_of(int block) const;
  // The best of these nodes of a block.
  Judged best_of(int block, uint64_t among) const;
};

class Rows {
 public:
  // The best of these nodes (null: of all), after those that changed since the last time were judged again.
  std::optional<Choice> best(const Cluster& cluster, Policy& policy, int request_class, uint32_t tenant,
                             const NodeSet* among);
  // The row, up to date until the cluster changes; it stays where it is until another row is asked for.
  Row& current(const Cluster& cluster, Policy& policy, int request_class, uint32_t tenant);
  static void catch_up(Row& row, const Cluster& cluster, Policy& policy);
  // From now on the row has its room, too.
  static void count_room(Row& row, const Cluster& cluster);
  // Judges again what changed, in every row, until `budget` judgements are spent. True when nothing is left.
  bool refresh(const Cluster& cluster, Policy& policy, int64_t& budget);
  // A row for what will be asked soon; refresh() fills it.
  void open(const Cluster& cluster, int request_class, uint32_t tenant) {
    row_for(cluster, request_class, tenant);
  }
  // Empty rows for what the other one has.
  void open_rows_of(const Rows& other);
  void drop_class(int request_class);

 private:
  static constexpr size_t kRowsMax = 2048;

  Row& row_for(const Cluster& cluster, int request_class, uint32_t tenant);
  void drop_oldest();
  static bool catch_up(Row& row, const Cluster& cluster, Policy& policy, int64_t& budget);
  static void judge(Row& row, const Cluster& cluster, Policy& policy, int node);

  std::unordered_map<uint64_t, Row> rows_;
  uint64_t uses_ = 0;
};

}  // namespace genie
