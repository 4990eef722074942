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
enum UnusableReason { kLacksBoth, kLacksGpu, kSatisfied, kLacksCpu, kNoGpu, kNoGpuLacksCpu, kWrongModel };
constexpr int kUnusableReasonCount = 7;

struct FreeResources {
  int model;
  int gpu_count;
  int cpu_milli;
  std::array<int, kGpusMax> gpu_milli;
};

FreeResources free_resources(const Node& node) {
  FreeResources free{node.model, node.gpu_count, node.free_cpu_milli, {}};
  for (int g = 0; g < node.gpu_count; ++g)
    free.gpu_milli[g] = node.is_gpu_open(g) ? node.gpus[g].free_milli : 0;
  return free;
}

UnusableReason unusable_reason(const FreeResources& free, const TypicalShape& shape) {
  const bool cpu = free.cpu_milli >= shape.cpu_milli;
  if (shape.gpu_milli == 0) return cpu ? kNoGpu : kNoGpuLacksCpu;
  if ((shape.models_mask >> free.model & 1) == 0) return kWrongModel;
  int enough = 0;
  for (int g = 0; g < free.gpu_count; ++g) enough += free.gpu_milli[g] >= shape.gpu_milli;
  if (enough >= shape.gpus) return cpu ? kSatisfied : kLacksCpu;
  return cpu ? kLacksGpu : kLacksBoth;
}

class FgdPolicy final : public Policy {
 public:
  explicit FgdPolicy(std::vector<TypicalShape> typical) : typical_shapes_(std::move(typical)) {}

  std::optional<Candidate> evaluate(const Cluster& cluster, int number, const RequestClass& request,
                                    uint32_t tenant) override {
    const Node& node = cluster.nodes()[number];
    if (!fits_except_gpus(node, number, request)) return std::nullopt;
    const FreeResources before = free_resources(node);
    if (request.gpus == 1 && request.requests_gpu_fraction())
      return choose_best_gpu(node, before, request, tenant);
    const uint16_t gpus = choose_tightest_gpus(node, request, tenant);
    if (request.gpus > 0 && gpus == 0) return std::nullopt;
    return candidate_from_score(score(before, request, gpus, fragmentation(before)), node, gpus);
  }

 private:
  std::optional<Candidate> choose_best_gpu(const Node& node, const FreeResources& before,
                                           const RequestClass& request, uint32_t tenant) const {
    int best = -1;
    uint16_t chosen = 0;
    double fragmentation_before = -1;
    uint16_t left = usable_gpus(node, request, tenant);
    while (left != 0) {
      const uint16_t gpus = find_interchangeable_gpus(before, left);
      left &= static_cast<uint16_t>(~gpus);
      if (fragmentation_before < 0) fragmentation_before = fragmentation(before);
      const int found = score(before, request, static_cast<uint16_t>(gpus & -gpus), fragmentation_before);
      if (found > best) {
        best = found;
        chosen = gpus;
      }
    }
    if (best < 0) return std::nullopt;
    return candidate_from_score(best, node, choose_closest_of_equal(node, chosen));
  }

  // The first of the GPUs and those with the same free share, which have the same score up to the order of
  // summation; the published code uses the first GPU with the highest score.
  static uint16_t find_interchangeable_gpus(const FreeResources& free, uint16_t gpus) {
    const int first = std::countr_zero(gpus);
    uint16_t found = 0;
    for (int g = first; g < free.gpu_count; ++g) {
      if ((gpus >> g & 1) != 0 && free.gpu_milli[g] == free.gpu_milli[first]) {
        found |= static_cast<uint16_t>(1 << g);
      }
    }
    return found;
  }

  int score(const FreeResources& before, const RequestClass& request, uint16_t gpus,
            double fragmentation_before) const {
    FreeResources after = before;
    after.cpu_milli -= request.cpu_milli;
    for (int g = 0; g < after.gpu_count; ++g) {
      if ((gpus >> g & 1) != 0) after.gpu_milli[g] -= request.gpu_milli;
    }
    const double gain = (fragmentation_before - fragmentation(after)) / 1000;
    return static_cast<int>(1.0 / (1.0 + std::exp(-gain)) * 100);
  }

  double fragmentation(const FreeResources& free) const {
    std::array<double, kUnusableReasonCount> sums{};
    int total = 0;
    for (int g = 0; g < free.gpu_count; ++g) total += free.gpu_milli[g];
    for (const TypicalShape& shape : typical_shapes_) {
      const UnusableReason reason = unusable_reason(free, shape);
      if (reason != kSatisfied) {
        sums[reason] += shape.share * total;
        continue;
      }
      int too_small = 0;
      for (int g = 0; g < free.gpu_count; ++g) {
        if (free.gpu_milli[g] < shape.gpu_milli) too_small += free.gpu_milli[g];
      }
      sums[kLacksGpu] += shape.share * too_small;
    }
    double sum = 0;
    for (int reason = 0; reason < kUnusableReasonCount; ++reason) {
      if (reason != kSatisfied) sum += sums[reason];
    }
    return sum;
  }

  std::vector<TypicalShape> typical_shapes_;
};

}  // namespace

std::unique_ptr<Policy> make_fgd(std::vector<TypicalShape> typical) {
  return std::make_unique<FgdPolicy>(std::move(typical));
}

}  // namespace genie
