#include "fill_simulation.h"

#include <algorithm>

#include "seeded_random.h"

namespace genie {
namespace {

// Length of a simulated sequence: kSimulatedArrivals, and kSimulatedArrivalsPerGpu more for each free GPU.
// Longer sequences overestimate the rare requests that fit the remainder of a node: it is one of many.
constexpr int kSimulatedArrivals = 10;
constexpr int kSimulatedArrivalsPerGpu = 5;

// Draws from repeated shuffles, so that each request of the history occurs equally often.
std::vector<const RequestClass*> draw_requests(std::vector<const RequestClass*> requests, size_t count) {
  SeededRandom random(0);
  std::vector<const RequestClass*> drawn;
  drawn.reserve(count);
  while (!requests.empty() && drawn.size() < count) {
    for (size_t left = requests.size(); left > 1; --left)
      std::swap(requests[left - 1], requests[random.next() % left]);
    const size_t part = std::min(requests.size(), count - drawn.size());
    drawn.insert(drawn.end(), requests.begin(), requests.begin() + static_cast<std::ptrdiff_t>(part));
  }
  return drawn;
}

// The smaller of the free share and the free share of memory.
int16_t usable_milli(const Gpu& gpu, int memory_mib) {
  if (memory_mib == 0) return static_cast<int16_t>(gpu.free_milli);
  const int64_t by_memory = int64_t{gpu.usable_memory_mib()} * kWholeGpuMilli / memory_mib;
  return static_cast<int16_t>(std::min<int64_t>(gpu.free_milli, by_memory));
}

void insert_gpu_sorted(FreeState& state, int16_t milli) {
  if (milli <= 0) return;
  int at = state.gpu_count++;
  for (; at > 0 && state.gpu_milli[at - 1] < milli; --at) state.gpu_milli[at] = state.gpu_milli[at - 1];
  state.gpu_milli[at] = milli;
}

}  // namespace

FreeState free_state_of(const Node& node) {
  FreeState state{node.free_cpu_milli,
                  node.free_memory_mib,
                  node.gpu_memory_mib,
                  static_cast<int16_t>(node.model),
                  0,
                  {}};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (node.is_gpu_open(g)) insert_gpu_sorted(state, usable_milli(node.gpus[g], node.gpu_memory_mib));
  }
  return state;
}

FreeState free_state_after(const Node& node, const RequestClass& request, uint16_t gpus) {
  FreeState state{node.free_cpu_milli - request.cpu_milli,
                  node.free_memory_mib - request.memory_mib,
                  node.gpu_memory_mib,
                  static_cast<int16_t>(node.model),
                  0,
                  {}};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!node.is_gpu_open(g)) continue;
    Gpu gpu = node.gpus[g];
    if ((gpus >> g & 1) != 0) {
      gpu.free_milli -= request.gpu_milli;
      gpu.free_memory_mib -= request.gpu_memory_mib;
    }
    insert_gpu_sorted(state, usable_milli(gpu, node.gpu_memory_mib));
  }
  return state;
}

// What is free on the node in each sequence.
struct FillSimulation::LaneState {
  alignas(64) std::array<std::array<int16_t, kSimulationLanes>, kGpusMax> free;
  alignas(64) std::array<int32_t, kSimulationLanes> cpu_milli;
  alignas(64) std::array<int32_t, kSimulationLanes> memory_mib;
};

FillSimulation::FillSimulation(const Cluster& cluster, const std::vector<RequestClass>& history,
                               int sequence_length_max) {
  std::vector<const RequestClass*> requests;
  for (const RequestClass& request : history) {
    if (request.gpus > 0) requests.push_back(&request);
  }
  const std::vector<const RequestClass*> drawn =
      draw_requests(std::move(requests), static_cast<size_t>(sequence_length_max) * kSimulationLanes);
  for (const auto& [hardware, count] : cluster.hardware_counts()) {  // sorted
    const NodeKind kind{hardware.model, hardware.gpu_memory_mib};
    if (arrival_plans_.empty() || arrival_plans_.back().kind != kind)
      arrival_plans_.push_back(make_arrival_plan(kind, drawn, sequence_length_max));
  }
}

FillSimulation::ArrivalPlan FillSimulation::make_arrival_plan(const NodeKind& kind,
                                                              const std::vector<const RequestClass*>& drawn,
                                                              int sequence_length_max) {
  ArrivalPlan plan;
  plan.kind = kind;
  if (drawn.empty()) return plan;
  plan.steps.resize(sequence_length_max);
  for (int t = 0; t < sequence_length_max; ++t) {
    ArrivalStep& step = plan.steps[t];
    step.has_multi_gpu = false;
    for (int lane = 0; lane < kSimulationLanes; ++lane) {
      const RequestClass& request = *drawn[lane * sequence_length_max + t];
      const bool allowed =
          (request.models_mask >> kind.model & 1) != 0 && request.gpu_memory_mib <= kind.gpu_memory_mib;
      int64_t need = request.gpu_milli;
      if (kind.gpu_memory_mib > 0 && request.requests_gpu_fraction()) {
        const int64_t mib = kind.gpu_memory_mib;
        need = std::max(need, (int64_t{request.gpu_memory_mib} * kWholeGpuMilli + mib - 1) / mib);
      }
      step.needed_milli[lane] = allowed ? static_cast<int16_t>(need) : kNeverFits;
      step.gpu_count[lane] = static_cast<int16_t>(request.gpus);
      step.cpu_milli[lane] = request.cpu_milli;
      step.memory_mib[lane] = request.memory_mib;
      if (!allowed) continue;
      step.has_multi_gpu = step.has_multi_gpu || request.gpus > 1;
      plan.needed_milli_min = std::min(plan.needed_milli_min, step.needed_milli[lane]);
      plan.cpu_milli_min = std::min(plan.cpu_milli_min, request.cpu_milli);
      plan.memory_mib_min = std::min(plan.memory_mib_min, request.memory_mib);
    }
  }
  return plan;
}

int64_t FillSimulation::total_filled_milli(const FreeState& state) const {
  const NodeKind kind{state.model, state.gpu_memory_mib};
  const auto before_it = [](const ArrivalPlan& plan, const NodeKind& other) { return plan.kind < other; };
  const auto found = std::lower_bound(arrival_plans_.begin(), arrival_plans_.end(), kind, before_it);
  if (found == arrival_plans_.end() || found->kind != kind) return 0;  // joined after the last update
  const ArrivalPlan& plan = *found;
  if (state.cpu_milli < plan.cpu_milli_min || state.memory_mib < plan.memory_mib_min) return 0;
  int gpus = 0;
  int64_t before = 0;
  LaneState lanes;
  for (; gpus < state.gpu_count && state.gpu_milli[gpus] >= plan.needed_milli_min; ++gpus) {
    lanes.free[gpus].fill(state.gpu_milli[gpus]);
    before += state.gpu_milli[gpus];
  }
  if (gpus == 0) return 0;
  lanes.cpu_milli.fill(state.cpu_milli);
  lanes.memory_mib.fill(state.memory_mib);
  const auto steps =
      static_cast<size_t>(kSimulatedArrivals + kSimulatedArrivalsPerGpu * before / kWholeGpuMilli);
  simulate(plan, std::min(steps, plan.steps.size()), gpus, lanes);
  int64_t after = 0;
  for (int g = 0; g < gpus; ++g) {
    for (int lane = 0; lane < kSimulationLanes; ++lane) after += lanes.free[g][lane];
  }
  return before * kSimulationLanes - after;
}

// AVX2 makes this three times as fast.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FOR_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_WIDE_VECTORS
#endif

// No branch depends on a lane, so the compiler can vectorize each step.
FOR_WIDE_VECTORS void FillSimulation::simulate(const ArrivalPlan& plan, size_t steps, int gpus,
                                               LaneState& lanes) {
  alignas(64) std::array<int16_t, kSimulationLanes> ok, best, left;
  for (size_t t = 0; t < steps; ++t) {
    const ArrivalStep& step = plan.steps[t];
    for (int i = 0; i < kSimulationLanes; ++i) {
      ok[i] = lanes.cpu_milli[i] >= step.cpu_milli[i] && lanes.memory_mib[i] >= step.memory_mib[i] ? -1 : 0;
    }
    best.fill(kNeverFits);
    for (int g = 0; g < gpus; ++g) {
      for (int i = 0; i < kSimulationLanes; ++i) {
        const int16_t free = lanes.free[g][i];
        best[i] = free >= step.needed_milli[i] && free < best[i] ? free : best[i];
      }
    }
    if (step.has_multi_gpu) {
      left.fill(0);
      for (int g = 0; g < gpus; ++g) {
        for (int i = 0; i < kSimulationLanes; ++i)
          left[i] += lanes.free[g][i] >= step.needed_milli[i] ? 1 : 0;
      }
      for (int i = 0; i < kSimulationLanes; ++i) ok[i] &= left[i] >= step.gpu_count[i] ? -1 : 0;
      // Multi-GPU requests use the first GPUs that fit.
      for (int i = 0; i < kSimulationLanes; ++i)
        left[i] = static_cast<int16_t>(step.gpu_count[i] > 1 ? step.gpu_count[i] & ok[i] : 0);
      for (int g = 0; g < gpus; ++g) {
        for (int i = 0; i < kSimulationLanes; ++i) {
          const int16_t hit = left[i] > 0 && lanes.free[g][i] >= step.needed_milli[i] ? -1 : 0;
          lanes.free[g][i] = static_cast<int16_t>(lanes.free[g][i] - (hit & step.needed_milli[i]));
          left[i] = static_cast<int16_t>(left[i] + hit);
        }
      }
    }
    for (int i = 0; i < kSimulationLanes; ++i)
      ok[i] = static_cast<int16_t>(ok[i] & (best[i] < kNeverFits ? -1 : 0));
    for (int i = 0; i < kSimulationLanes; ++i)
      left[i] = static_cast<int16_t>(step.gpu_count[i] == 1 ? ok[i] : 0);
    for (int g = 0; g < gpus; ++g) {
      for (int i = 0; i < kSimulationLanes; ++i) {
        const int16_t hit = static_cast<int16_t>(left[i] & (lanes.free[g][i] == best[i] ? -1 : 0));
        lanes.free[g][i] = static_cast<int16_t>(lanes.free[g][i] - (hit & step.needed_milli[i]));
        left[i] = static_cast<int16_t>(left[i] & ~hit);
      }
    }
    for (int i = 0; i < kSimulationLanes; ++i) {
      lanes.cpu_milli[i] -= static_cast<int32_t>(ok[i]) & step.cpu_milli[i];
      lanes.memory_mib[i] -= static_cast<int32_t>(ok[i]) & step.memory_mib[i];
    }
    if (t % 8 != 7) continue;
    // Stop when no further arrival can fit.
    int alive = 0;
    for (int i = 0; i < kSimulationLanes; ++i) best[i] = 0;
    for (int g = 0; g < gpus; ++g) {
      for (int i = 0; i < kSimulationLanes; ++i) best[i] = std::max(best[i], lanes.free[g][i]);
    }
    for (int i = 0; i < kSimulationLanes; ++i)
      alive |= best[i] >= plan.needed_milli_min && lanes.cpu_milli[i] >= plan.cpu_milli_min;
    if (alive == 0) return;
  }
}

}  // namespace genie
