// Every node's judgement for every request class in use, kept up to date change by change.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "policy.h"

namespace genie {

struct Choice {
  int node;
  uint16_t gpus;
};

class Rows {
 public:
  // The best node, after the nodes that changed since the last time were judged again.
  std::optional<Choice> best(const Cluster& cluster, Policy& policy, int request_class, uint32_t tenant);
  // Judges again what changed, in every row, until `budget` judgements are spent. True when nothing is left.
  bool refresh(const Cluster& cluster, Policy& policy, int64_t& budget);
  // A row for what will be asked soon; refresh() fills it.
  void open(const Cluster& cluster, int request_class, uint32_t tenant) {
    row_for(cluster, request_class, tenant);
  }
  // Empty rows for what the other one has.
  void open_rows_of(const Rows& other);

 private:
  struct Row {
    int request_class = 0;
    uint32_t tenant = 0;
    uint64_t used = 0;         // the higher, the later
    uint64_t read = 0;         // changes of the cluster that are in it
    int judged_up_to = 0;      // nodes below this one have been judged at all
    std::vector<double> cost;  // infinity: it does not fit there
    std::vector<uint64_t> tie;
    std::vector<uint16_t> gpus;
    std::vector<int> block_best;  // the best node of each block
  };
  static constexpr int kBlock = 64;
  static constexpr size_t kRowsMax = 2048;

  Row& row_for(const Cluster& cluster, int request_class, uint32_t tenant);
  void drop_oldest();
  static bool catch_up(Row& row, const Cluster& cluster, Policy& policy, int64_t& budget);
  static void judge(Row& row, const Cluster& cluster, Policy& policy, int node);
  static bool is_better(const Row& row, int one, int other);
  static void find_block_best(Row& row, int block);

  std::unordered_map<uint64_t, Row> rows_;
  uint64_t uses_ = 0;
};

}  // namespace genie
