// How good a place is. One object a policy; a policy that learns makes a new object when it has learned.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster.h"

namespace genie {

class Policy {
 public:
  virtual ~Policy() = default;
  // The best GPUs of this node for the request. Depends on nothing but its arguments and what was learned,
  // so that an answer holds until the node changes.
  virtual std::optional<Candidate> judge(const Cluster& cluster, int node, const RequestClass& wanted,
                                         uint32_t tenant) = 0;
};

// A shape of request that is common in a workload, with its share of all requests.
struct TypicalShape {
  int gpus = 0;
  int gpu_milli = 0;
  int cpu_milli = 0;
  uint64_t models = kAnyModel;
  double share = 0;
};

std::unique_ptr<Policy> make_dotprod();
std::unique_ptr<Policy> make_clustering();
std::unique_ptr<Policy> make_packing();
std::unique_ptr<Policy> make_bestfit();
std::unique_ptr<Policy> make_fgd(std::vector<TypicalShape> typical);

// Integer scores from 0 to 100, the higher the better; the node's rank decides ties.
inline Candidate scored(int score, const Node& node, uint16_t gpus) {
  return {-static_cast<double>(score), node.rank, gpus};
}

}  // namespace genie
