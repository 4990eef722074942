// Estimates how far a node would be filled if requests like the recent ones kept arriving.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <vector>

#include "cluster.h"

namespace genie {

constexpr int kSimulationLanes = 32;  // sequences of simulated arrivals

// What is free on a node, regardless of tenants and of the order of its GPUs.
struct FreeState {
  int32_t cpu_milli = 0;
  int32_t memory_mib = 0;
  int32_t gpu_memory_mib = 0;  // per GPU, free or not
  int16_t model = 0;
  int16_t gpu_count = 0;                      // GPUs with something free
  std::array<int16_t, kGpusMax> gpu_milli{};  // descending; then zeros
  bool operator==(const FreeState&) const = default;
  int count_free_whole_gpus() const {
    int count = 0;
    while (count < gpu_count && gpu_milli[count] == kWholeGpuMilli) ++count;
    return count;
  }
};
static_assert(sizeof(FreeState) == 16 + 2 * kGpusMax);

// Of the node now, or after placing `request` on `gpus`.
FreeState free_state_of(const Node& node);
FreeState free_state_after(const Node& node, const RequestClass& request, uint16_t gpus);

// Sequences of arrivals, drawn from a history; the same for every node.
class FillSimulation {
 public:
  // Requests without GPUs are ignored.
  FillSimulation(const Cluster& cluster, const std::vector<RequestClass>& history, int sequence_length_max);
  // The GPU thousandths that the arrivals fill on such a node, over all sequences.
  int64_t total_filled_milli(const FreeState& state) const;

 private:
  struct ArrivalStep {
    alignas(64) std::array<int16_t, kSimulationLanes> needed_milli;
    alignas(64) std::array<int16_t, kSimulationLanes> gpu_count;
    alignas(64) std::array<int32_t, kSimulationLanes> cpu_milli;
    alignas(64) std::array<int32_t, kSimulationLanes> memory_mib;
    bool has_multi_gpu;  // contains a multi-GPU request
  };
  // Nodes of one kind share an arrival plan.
  struct NodeKind {
    int model;
    int gpu_memory_mib;
    auto operator<=>(const NodeKind&) const = default;
  };
  struct ArrivalPlan {
    NodeKind kind;
    std::vector<ArrivalStep> steps;
    int16_t needed_milli_min = kNeverFits;
    int32_t cpu_milli_min = INT32_MAX;
    int32_t memory_mib_min = INT32_MAX;
  };
  struct LaneState;
  static constexpr int16_t kNeverFits = 30000;

  static ArrivalPlan make_arrival_plan(const NodeKind& kind, const std::vector<const RequestClass*>& drawn,
                                       int sequence_length_max);
  static void simulate(const ArrivalPlan& plan, size_t steps, int gpus, LaneState& lanes);

  std::vector<ArrivalPlan> arrival_plans_;  // one per kind, sorted
};

}  // namespace genie
