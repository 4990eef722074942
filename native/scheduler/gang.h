// Places for all workers of a gang, or none.
#pragma once

#include <optional>
#include <vector>

#include "rows.h"

namespace genie {

struct Gang {
  int request_class = 0;  // of each worker
  uint32_t tenant = 0;
  int workers = 0;
  int workers_min = 0;  // so many will do; 0: all of them
  bool spread = false;  // each on a node of its own
  int least() const { return workers_min > 0 ? workers_min : workers; }
};

class GangPlacer {
 public:
  // The row is the class's, and up to date.
  GangPlacer(Cluster& cluster, Policy& policy, Row& row, const Gang& gang);
  // All of them in one of the domains (null: all nodes), on nodes that are in `among` too (null: all). Of the
  // domains that can, the one with room for the fewest; when none can, the one that takes the most.
  std::optional<std::vector<Choice>> place(const std::vector<const NodeSet*>& domains, const NodeSet* among);

 private:
  struct Domain {
    int64_t room;  // for so many workers at most
    int index;
    bool operator<(const Domain& other) const {
      return room != other.room ? room < other.room : index < other.index;
    }
  };

  static uint64_t word(const NodeSet* domain, const NodeSet* among, int block);
  int64_t room_in(const NodeSet* domain, const NodeSet* among) const;
  // As many as fit, one after the other, into places_.
  void fill(const NodeSet* domain, const NodeSet* among, int workers);
  void give_back();

  Cluster& cluster_;
  Policy& policy_;
  Row& row_;
  Gang gang_;
  int blocks_;
  std::vector<Choice> places_;
};

}  // namespace genie
