// Places all workers of a gang, or none.
#pragma once

#include <optional>
#include <vector>

#include "evaluation_cache.h"

namespace genie {

struct Gang {
  int request_class = 0;  // of each worker
  uint32_t tenant = 0;
  int worker_count = 0;
  int worker_count_min = 0;          // 0: all
  bool one_worker_per_node = false;  // each on its own node
  int required_worker_count() const { return worker_count_min > 0 ? worker_count_min : worker_count; }
};

class GangPlacer {
 public:
  // `evaluations` are those of the class, and up to date.
  GangPlacer(Cluster& cluster, PlacementPolicy& policy, ClassEvaluations& evaluations, const Gang& gang);
  // Places all in one of the domains (null: all nodes), on nodes in `among` (null: all). Uses the sufficient
  // domain with the least capacity; if none is sufficient, the one that holds the most.
  std::optional<std::vector<NodeChoice>> place_in_one_domain(const std::vector<const NodeSet*>& domains,
                                                             const NodeSet* among);

 private:
  struct DomainCapacity {
    int64_t capacity;  // upper bound of workers
    int domain_index;
    bool operator<(const DomainCapacity& other) const {
      return capacity != other.capacity ? capacity < other.capacity : domain_index < other.domain_index;
    }
  };

  static uint64_t allowed_nodes_in_block(const NodeSet* domain, const NodeSet* among, int block);
  int64_t domain_capacity(const NodeSet* domain, const NodeSet* among) const;
  // Places as many as fit, one after the other, into worker_choices_.
  void place_workers_up_to(const NodeSet* domain, const NodeSet* among, int worker_count);
  void release_placed_workers();

  Cluster& cluster_;
  PlacementPolicy& policy_;
  ClassEvaluations& evaluations_;
  Gang gang_;
  int block_count_;
  std::vector<NodeChoice> worker_choices_;
};

}  // namespace genie
