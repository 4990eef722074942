// Fragmentation gradient descent: take the place after which typical requests can use most of what is free.
#include <array>
#include <bit>
#include <cmath>

#include "gpus.h"
#include "policy.h"

namespace genie {
namespace {

// Why a typical request cannot use what is free on a node. The published figures depend on the last bit of
// these sums: they are kept apart by reason, added in this order, and the score is cut to an integer.
enum Reason { kLacksBoth, kLacksGpu, kSatisfied, kLacksCpu, kNoGpuWanted, kNoGpuWantedLacksCpu, kWrongModel };
constexpr int kReasons = 7;

struct Free {
  int model;
  int gpu_count;
  int cpu_milli;
  std::array<int, kGpusMax> gpu_milli;
};

Free free_of(const Node& node) {
  Free free{node.model, node.gpu_count, node.free_cpu_milli, {}};
  for (int g = 0; g < node.gpu_count; ++g) free.gpu_milli[g] = node.gpu_open(g) ? node.gpus[g].free_milli : 0;
  return free;
}

Reason reason_for(const Free& free, const TypicalShape& shape) {
  const bool cpu = free.cpu_milli >= shape.cpu_milli;
  if (shape.gpu_milli == 0) return cpu ? kNoGpuWanted : kNoGpuWantedLacksCpu;
  if ((shape.models >> free.model & 1) == 0) return kWrongModel;
  int enough = 0;
  for (int g = 0; g < free.gpu_count; ++g) enough += free.gpu_milli[g] >= shape.gpu_milli;
  if (enough >= shape.gpus) return cpu ? kSatisfied : kLacksCpu;
  return cpu ? kLacksGpu : kLacksBoth;
}

class Fgd final : public Policy {
 public:
  explicit Fgd(std::vector<TypicalShape> typical) : typical_(std::move(typical)) {}

  std::optional<Candidate> judge(const Cluster& cluster, int number, const RequestClass& wanted,
                                 uint32_t tenant) override {
    const Node& node = cluster.nodes()[number];
    if (!fits_beside_gpus(node, number, wanted)) return std::nullopt;
    const Free before = free_of(node);
    if (wanted.gpus == 1 && wanted.is_fraction()) return best_gpu(node, before, wanted, tenant);
    const uint16_t gpus = tightest_gpus(node, wanted, tenant);
    if (wanted.gpus > 0 && gpus == 0) return std::nullopt;
    return scored(score(before, wanted, gpus, fragments(before)), node, gpus);
  }

 private:
  std::optional<Candidate> best_gpu(const Node& node, const Free& before, const RequestClass& wanted,
                                    uint32_t tenant) const {
    int best = -1;
    uint16_t chosen = 0;
    double fragments_before = -1;
    uint16_t left = usable_gpus(node, wanted, tenant);
    while (left != 0) {
      const uint16_t gpus = alike(before, left);
      left &= static_cast<uint16_t>(~gpus);
      if (fragments_before < 0) fragments_before = fragments(before);
      const int found = score(before, wanted, static_cast<uint16_t>(gpus & -gpus), fragments_before);
      if (found > best) {
        best = found;
        chosen = gpus;
      }
    }
    if (best < 0) return std::nullopt;
    return scored(best, node, nearest_like(node, chosen));
  }

  // The first of the GPUs and those with as much free: they have its score, up to the order in which parts
  // are added; the published code takes the first of those with the highest score.
  static uint16_t alike(const Free& free, uint16_t gpus) {
    const int first = std::countr_zero(gpus);
    uint16_t found = 0;
    for (int g = first; g < free.gpu_count; ++g) {
      if ((gpus >> g & 1) != 0 && free.gpu_milli[g] == free.gpu_milli[first]) {
        found |= static_cast<uint16_t>(1 << g);
      }
    }
    return found;
  }

  int score(const Free& before, const RequestClass& wanted, uint16_t gpus, double fragments_before) const {
    Free after = before;
    after.cpu_milli -= wanted.cpu_milli;
    for (int g = 0; g < after.gpu_count; ++g) {
      if ((gpus >> g & 1) != 0) after.gpu_milli[g] -= wanted.gpu_milli;
    }
    const double gain = (fragments_before - fragments(after)) / 1000;
    return static_cast<int>(1.0 / (1.0 + std::exp(-gain)) * 100);
  }

  double fragments(const Free& free) const {
    std::array<double, kReasons> sums{};
    int total = 0;
    for (int g = 0; g < free.gpu_count; ++g) total += free.gpu_milli[g];
    for (const TypicalShape& shape : typical_) {
      const Reason reason = reason_for(free, shape);
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
    for (int reason = 0; reason < kReasons; ++reason) {
      if (reason != kSatisfied) sum += sums[reason];
    }
    return sum;
  }

  std::vector<TypicalShape> typical_;
};

}  // namespace

std::unique_ptr<Policy> make_fgd(std::vector<TypicalShape> typical) {
  return std::make_unique<Fgd>(std::move(typical));
}

}  // namespace genie
