// How much a node would come to hold if requests like those of late kept arriving.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <vector>

#include "cluster.h"

namespace genie {

constexpr int kLanes = 32;  // sequences of imagined arrivals

// What is free on a node, as far as a request without a name and a tenant can see it. Equal nodes are equal
// here, whatever their GPUs' order.
struct FreeState {
  int32_t cpu_milli = 0;
  int32_t memory_mib = 0;
  int32_t gpu_memory_mib = 0;  // of each GPU, free or not
  int16_t model = 0;
  int16_t gpu_count = 0;                      // of those with something free
  std::array<int16_t, kGpusMax> gpu_milli{};  // the largest first; zeros after them
  bool operator==(const FreeState&) const = default;
  int whole_gpus() const {
    int count = 0;
    while (count < gpu_count && gpu_milli[count] == kFullMilli) ++count;
    return count;
  }
};
static_assert(sizeof(FreeState) == 16 + 2 * kGpusMax);

// The node, or the node as it will be when `wanted` is on `gpus`.
FreeState free_state(const Node& node);
FreeState free_state_after(const Node& node, const RequestClass& wanted, uint16_t gpus);

// Sequences of arrivals, drawn from a history and the same for every node.
class Fill {
 public:
  // Requests without GPUs are left out.
  Fill(const Cluster& cluster, const std::vector<RequestClass>& history, int draws);
  // The GPU thousandths that the sequences put on such a node, all sequences together.
  int64_t of(const FreeState& state) const;

 private:
  struct Step {
    alignas(64) std::array<int16_t, kLanes> need;
    alignas(64) std::array<int16_t, kLanes> count;
    alignas(64) std::array<int32_t, kLanes> cpu_milli;
    alignas(64) std::array<int32_t, kLanes> memory_mib;
    bool several;  // a request of several GPUs is among them
  };
  // Nodes of one kind see the sequences alike.
  struct Kind {
    int model;
    int gpu_memory_mib;
    auto operator<=>(const Kind&) const = default;
  };
  struct Script {
    Kind kind;
    std::vector<Step> steps;
    int16_t need_min = kNever;
    int32_t cpu_min = INT32_MAX;
    int32_t memory_min = INT32_MAX;
  };
  struct Hands;
  static constexpr int16_t kNever = 30000;

  static Script script_for(const Kind& kind, const std::vector<RequestClass>& drawn, int draws);
  static void play(const Script& script, size_t steps, int gpus, Hands& hands);

  std::vector<Script> scripts_;  // one a kind, in their order
};

}  // namespace genie
