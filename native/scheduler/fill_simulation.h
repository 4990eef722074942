// Estimates how far a node would be filled if requests like the recent ones kept arriving.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <vector>

#include "cluster.h"

namespace genie {

constexpr int kSimulatedSequences = 32;

// What is free on a node, regardless of tenants and of the order of its GPUs.
struct NodeFreeState {
  int32_t free_cpu_milli = 0;
  int32_t free_memory_mib = 0;
  int32_t memory_per_gpu_mib = 0;  // free or not
  int16_t gpu_model = 0;
  int16_t partly_free_gpu_count = 0;                         // GPUs with something free
  std::array<int16_t, kGpusPerNodeMax> free_milli_by_gpu{};  // descending; then zeros
  bool operator==(const NodeFreeState&) const = default;
  int count_free_whole_gpus() const {
    int count = 0;
    while (count < partly_free_gpu_count && free_milli_by_gpu[count] == kWholeGpuMilli) ++count;
    return count;
  }
};
static_assert(sizeof(NodeFreeState) == 16 + 2 * kGpusPerNodeMax);

// Of the node now, or after placing `request` on `gpus`.
NodeFreeState node_free_state(const Node& node);
NodeFreeState node_free_state_after(const Node& node, const RequestClass& request, GpuMask gpus);

// Sequences of arrivals, drawn from a history; the same for every node.
class FillSimulation {
 public:
  // Requests without GPUs are ignored.
  FillSimulation(const Cluster& cluster, const std::vector<RequestClass>& history,
                 int simulated_arrivals_max);
  // The GPU thousandths that the arrivals fill on such a node, over all sequences.
  int64_t simulate_total_filled_milli(const NodeFreeState& state) const;

 private:
  struct ArrivalStep {
    alignas(64) std::array<int16_t, kSimulatedSequences> needed_milli_per_gpu;
    alignas(64) std::array<int16_t, kSimulatedSequences> requested_gpu_count;
    alignas(64) std::array<int32_t, kSimulatedSequences> requested_cpu_milli;
    alignas(64) std::array<int32_t, kSimulatedSequences> requested_memory_mib;
    bool has_multi_gpu_request;
  };
  // Nodes of one kind share an arrival plan.
  struct NodeKind {
    int gpu_model;
    int memory_per_gpu_mib;
    auto operator<=>(const NodeKind&) const = default;
  };
  struct ArrivalPlan {
    NodeKind kind;
    std::vector<ArrivalStep> steps;
    int16_t needed_milli_per_gpu_min = kNeverFitsMilli;
    int32_t requested_cpu_milli_min = INT32_MAX;
    int32_t requested_memory_mib_min = INT32_MAX;
  };
  struct SequenceStates;
  static constexpr int16_t kNeverFitsMilli = 30000;

  static ArrivalPlan make_arrival_plan(const NodeKind& kind, const std::vector<const RequestClass*>& drawn,
                                       int simulated_arrivals_max);
  static void place_arrivals(const ArrivalPlan& plan, size_t steps, int gpus, SequenceStates& lanes);

  std::vector<ArrivalPlan> arrival_plans_;  // one per kind, sorted
};

}  // namespace genie
