// Published policies for comparison: dot product, clustering, packing, best fit. FGD has its own file.
#include <algorithm>
#include <array>

#include "gpu_selection.h"
#include "policy.h"

namespace genie {
namespace {

// The published scores divide by the largest node of their cluster.
constexpr double kLargestNodeCpuMilli = 128000;
constexpr double kLargestNodeGpuMilli = 8000;
constexpr int kScoreMax = 100;

// Scores nodes and uses the tightest GPUs.
class TightestGpusPolicy : public PlacementPolicy {
 public:
  std::optional<PlacementCandidate> evaluate_node(const Cluster& cluster, int number,
                                                  const RequestClass& request, uint32_t tenant) override {
    const Node& node = cluster.nodes()[number];
    if (!fits_except_gpus(node, number, request)) return std::nullopt;
    const GpuMask gpus = choose_tightest_gpus(node, request, tenant);
    if (request.gpu_count > 0 && gpus == 0) return std::nullopt;
    return candidate_from_score(score_node(node, request, gpus), node, gpus);
  }

 private:
  virtual int score_node(const Node& node, const RequestClass& request, GpuMask gpus) const = 0;
};

class DotProductPolicy final : public TightestGpusPolicy {
  int score_node(const Node& node, const RequestClass& request, GpuMask) const override {
    const double cpu =
        node.free_cpu_milli / kLargestNodeCpuMilli * (request.cpu_milli / kLargestNodeCpuMilli);
    const double gpu = node.total_free_gpu_milli() / kLargestNodeGpuMilli *
                       (request.total_gpu_milli() / kLargestNodeGpuMilli);
    return static_cast<int>(kScoreMax * (1 - (cpu + gpu) / 2));
  }
};

class ClusteringPolicy final : public TightestGpusPolicy {
  int score_node(const Node& node, const RequestClass& request, GpuMask) const override {
    if (request.gpu_count == 0) return 0;
    const int full = kScoreMax / 4 * (static_cast<int>(kLargestNodeGpuMilli) - node.total_free_gpu_milli()) /
                     static_cast<int>(kLargestNodeGpuMilli);
    const auto kinds = std::count_if(node.held_requests_by_gpu_count.begin(),
                                     node.held_requests_by_gpu_count.end(), [](uint16_t n) { return n > 0; });
    if (node.held_requests_by_gpu_count[request.requests_gpu_fraction() ? 0 : request.gpu_count] > 0) {
      return full + (kinds == 1 ? kScoreMax * 3 / 4 : kScoreMax * 2 / 4);
    }
    return full + (kinds == 0 ? kScoreMax / 4 : 0);
  }
};

class PackingPolicy final : public TightestGpusPolicy {
  int score_node(const Node& node, const RequestClass& request, GpuMask gpus) const override {
    if (request.gpu_count == 0) return 0;
    const int whole = node.count_free_whole_gpus();
    if (whole == node.gpu_count) return std::max(kScoreMax / 3 - whole, whole);
    int whole_used = 0;
    int free_percent = 0;
    for (int g = 0; g < node.gpu_count; ++g) {
      if ((gpus >> g & 1) == 0) continue;
      whole_used += node.gpus[g].free_milli == kWholeGpuMilli;
      free_percent += node.gpus[g].free_milli * 100 / kWholeGpuMilli;
    }
    if (whole_used > 0) return std::max(kScoreMax / 2 - whole_used, kScoreMax / 3);
    return std::max(kScoreMax - free_percent / 10, kScoreMax / 2);
  }
};

class BestFitPolicy final : public TightestGpusPolicy {
  int score_node(const Node& node, const RequestClass& request, GpuMask) const override {
    const double cpu = (node.free_cpu_milli - request.cpu_milli) / kLargestNodeCpuMilli * 0.5;
    const double gpu = (node.total_free_gpu_milli() - request.total_gpu_milli()) / kLargestNodeGpuMilli * 0.5;
    return static_cast<int>((1.0 - (cpu + gpu)) * kScoreMax);
  }
};

}  // namespace

std::unique_ptr<PlacementPolicy> make_dot_product_policy() { return std::make_unique<DotProductPolicy>(); }
std::unique_ptr<PlacementPolicy> make_clustering_policy() { return std::make_unique<ClusteringPolicy>(); }
std::unique_ptr<PlacementPolicy> make_packing_policy() { return std::make_unique<PackingPolicy>(); }
std::unique_ptr<PlacementPolicy> make_best_fit_policy() { return std::make_unique<BestFitPolicy>(); }

}  // namespace genie
