// Places all workers of a gang, or none.
#pragma once

#include <optional>
#include <vector>

#include "evaluation_cache.h"

namespace genie {

struct Gang {
  int request_class = 0;  // of each worker
  uint32_t tenant = 0;
  int workers = 0;
  int workers_min = 0;  // 0: all
  bool spread = false;  // each on its own node
  int required_workers() const { return workers_min > 0 ? workers_min : workers; }
};

class GangPlacer {
 public:
  // `evaluations` are those of the class, and up to date.
  GangPlacer(Cluster& cluster, Policy& policy, ClassEvaluations& evaluations, const Gang& gang);
  // Places all in one of the domains (null: all nodes), on nodes in `among` (null: all). Uses the sufficient
  // domain with the least capacity; if none is sufficient, the one that holds the most.
  std::optional<std::vector<NodeChoice>> place(const std::vector<const NodeSet*>& domains,
                                               const NodeSet* among);

 private:
  struct DomainCapacity {
    int64_t capacity;  // upper bound of workers
    int index;
    bool operator<(const DomainCapacity& other) const {
      return capacity != other.capacity ? capacity < other.capacity : index < other.index;
    }
  };

  static uint64_t node_mask(const NodeSet* domain, const NodeSet* among, int block);
  int64_t capacity_of_domain(const NodeSet* domain, const NodeSet* among) const;
  // Places as many as fit, one after the other, into choices_.
  void place_up_to(const NodeSet* domain, const NodeSet* among, int workers);
  void release_all();

  Cluster& cluster_;
  Policy& policy_;
  ClassEvaluations& evaluations_;
  Gang gang_;
  int block_count_;
  std::vector<NodeChoice> choices_;
};

}  // namespace genie
