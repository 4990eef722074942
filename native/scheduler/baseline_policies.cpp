// Published policies for comparison: dot product, clustering, packing, best fit. FGD has its own file.
#include <algorithm>
#include <array>

#include "gpu_selection.h"
#include "policy.h"

namespace genie {
namespace {

// The published scores divide by the largest node of their cluster.
constexpr double kCpuMilliMax = 128000;
constexpr double kGpuMilliMax = 8000;
constexpr int kScoreMax = 100;

// Scores nodes and uses the tightest GPUs.
class ScoredPolicy : public Policy {
 public:
  std::optional<Candidate> evaluate(const Cluster& cluster, int number, const RequestClass& request,
                                    uint32_t tenant) override {
    const Node& node = cluster.nodes()[number];
    if (!fits_except_gpus(node, number, request)) return std::nullopt;
    const uint16_t gpus = choose_tightest_gpus(node, request, tenant);
    if (request.gpus > 0 && gpus == 0) return std::nullopt;
    return candidate_from_score(score(node, request, gpus), node, gpus);
  }

 private:
  virtual int score(const Node& node, const RequestClass& request, uint16_t gpus) const = 0;
};

class DotProductPolicy final : public ScoredPolicy {
  int score(const Node& node, const RequestClass& request, uint16_t) const override {
    const double cpu = node.free_cpu_milli / kCpuMilliMax * (request.cpu_milli / kCpuMilliMax);
    const double gpu = node.free_gpu_milli() / kGpuMilliMax * (request.total_gpu_milli() / kGpuMilliMax);
    return static_cast<int>(kScoreMax * (1 - (cpu + gpu) / 2));
  }
};

class ClusteringPolicy final : public ScoredPolicy {
  int score(const Node& node, const RequestClass& request, uint16_t) const override {
    if (request.gpus == 0) return 0;
    const int full = kScoreMax / 4 * (static_cast<int>(kGpuMilliMax) - node.free_gpu_milli()) /
                     static_cast<int>(kGpuMilliMax);
    const auto kinds =
        std::count_if(node.held_requests.begin(), node.held_requests.end(), [](uint16_t n) { return n > 0; });
    if (node.held_requests[request.requests_gpu_fraction() ? 0 : request.gpus] > 0) {
      return full + (kinds == 1 ? kScoreMax * 3 / 4 : kScoreMax * 2 / 4);
    }
    return full + (kinds == 0 ? kScoreMax / 4 : 0);
  }
};

class PackingPolicy final : public ScoredPolicy {
  int score(const Node& node, const RequestClass& request, uint16_t gpus) const override {
    if (request.gpus == 0) return 0;
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

class BestFitPolicy final : public ScoredPolicy {
  int score(const Node& node, const RequestClass& request, uint16_t) const override {
    const double cpu = (node.free_cpu_milli - request.cpu_milli) / kCpuMilliMax * 0.5;
    const double gpu = (node.free_gpu_milli() - request.total_gpu_milli()) / kGpuMilliMax * 0.5;
    return static_cast<int>((1.0 - (cpu + gpu)) * kScoreMax);
  }
};

}  // namespace

std::unique_ptr<Policy> make_dotprod() { return std::make_unique<DotProductPolicy>(); }
std::unique_ptr<Policy> make_clustering() { return std::make_unique<ClusteringPolicy>(); }
std::unique_ptr<Policy> make_packing() { return std::make_unique<PackingPolicy>(); }
std::unique_ptr<Policy> make_bestfit() { return std::make_unique<BestFitPolicy>(); }

}  // namespace genie
