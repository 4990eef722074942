// Fragmentation gradient descent: minimizes the free GPU share that typical requests cannot use.
#include <array>
#include <bit>
#include <cmath>

#include "gpu_selection.h"
#include "policy.h"

namespace genie {
namespace {

// Why a typical request cannot use the free GPUs of a node. The published results depend on the last bit of
// these sums: they are kept by reason, added in this order, and the score is truncated to an integer.
enum FitResult {
  kLacksGpuAndCpu,
  kLacksGpu,
  kFits,
  kLacksCpu,
  kRequestsNoGpu,
  kRequestsNoGpuLacksCpu,
  kWrongModel
};
constexpr int kFitResultCount = 7;

struct FreeResources {
  int gpu_model;
  int gpu_count;
  int free_cpu_milli;
  std::array<int, kGpusPerNodeMax> free_milli_by_gpu;
};

FreeResources free_resources(const Node& node) {
  FreeResources free{node.gpu_model, node.gpu_count, node.free_cpu_milli, {}};
  for (int g = 0; g < node.gpu_count; ++g)
    free.free_milli_by_gpu[g] = node.is_gpu_schedulable(g) ? node.gpus[g].free_milli : 0;
  return free;
}

FitResult fit_result(const FreeResources& free, const TypicalShape& shape) {
  const bool cpu = free.free_cpu_milli >= shape.cpu_milli;
  if (shape.milli_per_gpu == 0) return cpu ? kRequestsNoGpu : kRequestsNoGpuLacksCpu;
  if ((shape.allowed_gpu_models >> free.gpu_model & 1) == 0) return kWrongModel;
  int enough = 0;
  for (int g = 0; g < free.gpu_count; ++g) enough += free.free_milli_by_gpu[g] >= shape.milli_per_gpu;
  if (enough >= shape.gpu_count) return cpu ? kFits : kLacksCpu;
  return cpu ? kLacksGpu : kLacksGpuAndCpu;
}

class FgdPolicy final : public PlacementPolicy {
 public:
  explicit FgdPolicy(std::vector<TypicalShape> typical) : typical_shapes_(std::move(typical)) {}

  std::optional<PlacementCandidate> evaluate_node(const Cluster& cluster, int number,
                                                  const RequestClass& request, uint32_t tenant) override {
    const Node& node = cluster.nodes()[number];
    if (!fits_except_gpus(node, number, request)) return std::nullopt;
    const FreeResources before = free_resources(node);
    if (request.gpu_count == 1 && request.requests_gpu_fraction())
      return choose_best_gpu(node, before, request, tenant);
    const GpuMask gpus = choose_tightest_gpus(node, request, tenant);
    if (request.gpu_count > 0 && gpus == 0) return std::nullopt;
    return candidate_from_score(score_placement(before, request, gpus, fragmentation(before)), node, gpus);
  }

 private:
  std::optional<PlacementCandidate> choose_best_gpu(const Node& node, const FreeResources& before,
                                                    const RequestClass& request, uint32_t tenant) const {
    int best = -1;
    GpuMask chosen = 0;
    double fragmentation_before = -1;
    GpuMask left = find_usable_gpus(node, request, tenant);
    while (left != 0) {
      const GpuMask gpus = find_interchangeable_gpus(before, left);
      left &= static_cast<GpuMask>(~gpus);
      if (fragmentation_before < 0) fragmentation_before = fragmentation(before);
      const int found =
          score_placement(before, request, static_cast<GpuMask>(gpus & -gpus), fragmentation_before);
      if (found > best) {
        best = found;
        chosen = gpus;
      }
    }
    if (best < 0) return std::nullopt;
    return candidate_from_score(best, node, choose_closest_gpu(node, chosen));
  }

  // The first of the GPUs and those with the same free share, which have the same score up to the order of
  // summation; the published code uses the first GPU with the highest score.
  static GpuMask find_interchangeable_gpus(const FreeResources& free, GpuMask gpus) {
    const int first = std::countr_zero(gpus);
    GpuMask found = 0;
    for (int g = first; g < free.gpu_count; ++g) {
      if ((gpus >> g & 1) != 0 && free.free_milli_by_gpu[g] == free.free_milli_by_gpu[first]) {
        found |= static_cast<GpuMask>(1 << g);
      }
    }
    return found;
  }

  int score_placement(const FreeResources& before, const RequestClass& request, GpuMask gpus,
                      double fragmentation_before) const {
    FreeResources after = before;
    after.free_cpu_milli -= request.cpu_milli;
    for (int g = 0; g < after.gpu_count; ++g) {
      if ((gpus >> g & 1) != 0) after.free_milli_by_gpu[g] -= request.milli_per_gpu;
    }
    const double gain = (fragmentation_before - fragmentation(after)) / 1000;
    return static_cast<int>(1.0 / (1.0 + std::exp(-gain)) * 100);
  }

  double fragmentation(const FreeResources& free) const {
    std::array<double, kFitResultCount> sums{};
    int total = 0;
    for (int g = 0; g < free.gpu_count; ++g) total += free.free_milli_by_gpu[g];
    for (const TypicalShape& shape : typical_shapes_) {
      const FitResult reason = fit_result(free, shape);
      if (reason != kFits) {
        sums[reason] += shape.request_share * total;
        continue;
      }
      int too_small = 0;
      for (int g = 0; g < free.gpu_count; ++g) {
        if (free.free_milli_by_gpu[g] < shape.milli_per_gpu) too_small += free.free_milli_by_gpu[g];
      }
      sums[kLacksGpu] += shape.request_share * too_small;
    }
    double sum = 0;
    for (int reason = 0; reason < kFitResultCount; ++reason) {
      if (reason != kFits) sum += sums[reason];
    }
    return sum;
  }

  std::vector<TypicalShape> typical_shapes_;
};

}  // namespace

std::unique_ptr<PlacementPolicy> make_fgd_policy(std::vector<TypicalShape> typical) {
  return std::make_unique<FgdPolicy>(std::move(typical));
}

}  // namespace genie
