// Rates places. A policy that learns is replaced by a new object when it has learned.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster.h"

namespace genie {

class PlacementPolicy {
 public:
  virtual ~PlacementPolicy() = default;
  // The best GPUs of this node for the request. Depends only on its arguments and what was learned, so a
  // result is valid until the node changes.
  virtual std::optional<PlacementCandidate> evaluate_node(const Cluster& cluster, int node,
                                                          const RequestClass& request, uint32_t tenant) = 0;
  // The number of fill simulations so far: they take most of the time of an evaluation that needs one.
  virtual uint64_t fill_simulation_count() const { return 0; }
};

constexpr int64_t kFillSimulationWorkUnits = 40;  // in evaluations, see WorkBudget

// A common kind of request and its share of all requests.
struct TypicalShape {
  int gpu_count = 0;
  int milli_per_gpu = 0;
  int cpu_milli = 0;
  GpuModelMask allowed_gpu_models = kAnyGpuModel;
  double request_share = 0;  // of all requests
};

std::unique_ptr<PlacementPolicy> make_dot_product_policy();
std::unique_ptr<PlacementPolicy> make_clustering_policy();
std::unique_ptr<PlacementPolicy> make_packing_policy();
std::unique_ptr<PlacementPolicy> make_best_fit_policy();
std::unique_ptr<PlacementPolicy> make_fgd_policy(std::vector<TypicalShape> typical);

// Integer scores from 0 to 100, higher is better; its tie_break_rank breaks ties.
inline PlacementCandidate candidate_from_score(int score, const Node& node, GpuMask gpus) {
  return {-static_cast<double>(score), node.tie_break_rank, gpus};
}

}  // namespace genie
