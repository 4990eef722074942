// Rates places. A policy that learns is replaced by a new object when it has learned.
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
  // The best GPUs of this node for the request. Depends only on its arguments and what was learned, so a
  // result is valid until the node changes.
  virtual std::optional<Candidate> evaluate(const Cluster& cluster, int node, const RequestClass& request,
                                            uint32_t tenant) = 0;
  // The number of fill simulations so far: they take most of the time of an evaluation that needs one.
  virtual uint64_t simulation_count() const { return 0; }
};

constexpr int64_t kSimulationWork = 40;  // in evaluations, see WorkBudget

// A common kind of request and its share of all requests.
struct TypicalShape {
  int gpus = 0;
  int gpu_milli = 0;
  int cpu_milli = 0;
  uint64_t models_mask = kAnyModel;
  double share = 0;
};

std::unique_ptr<Policy> make_dotprod();
std::unique_ptr<Policy> make_clustering();
std::unique_ptr<Policy> make_packing();
std::unique_ptr<Policy> make_bestfit();
std::unique_ptr<Policy> make_fgd(std::vector<TypicalShape> typical);

// Integer scores from 0 to 100, higher is better; its tie_break_rank breaks ties.
inline Candidate candidate_from_score(int score, const Node& node, uint16_t gpus) {
  return {-static_cast<double>(score), node.tie_break_rank, gpus};
}

}  // namespace genie
