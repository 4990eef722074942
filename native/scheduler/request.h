// Request classes and candidates. A request class is registered once; requests refer to it by number.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "node_set.h"

namespace genie {

constexpr int kGpusMax = 16;
constexpr int kModelsMax = 64;
constexpr int kWholeGpuMilli = 1000;
constexpr uint64_t kAnyModel = ~uint64_t{0};

// Number of GPUs in a set. The baseline instruction set has no popcount, and a call is slower.
constexpr int count_gpus(uint16_t gpus) {
  unsigned sums = gpus - (gpus >> 1 & 0x5555u);
  sums = (sums & 0x3333u) + (sums >> 2 & 0x3333u);
  sums = (sums + (sums >> 4)) & 0x0f0fu;
  return static_cast<int>((sums + (sums >> 8)) & 0x1fu);
}

// An invalid call; Python gets genie.errors.UsageError.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct RequestClass {
  int gpus = 0;            // different GPUs of one node
  int gpu_milli = 0;       // per GPU
  int gpu_memory_mib = 0;  // per GPU
  int cpu_milli = 0;
  int memory_mib = 0;
  uint64_t models_mask = kAnyModel;  // bit m: model m is allowed
  bool one_island = false;           // all its GPUs in one NVLink island
  uint16_t only_gpus = 0xffff;       // bit g: GPU g of a node is allowed
  std::optional<NodeSet> nodes;      // allowed nodes; nullopt: all
  int64_t total_gpu_milli() const { return int64_t{gpus} * gpu_milli; }
  bool requests_gpu_fraction() const { return gpus > 0 && gpu_milli < kWholeGpuMilli; }
  RequestClass without_node_constraints() const {
    return {gpus,        gpu_milli,  gpu_memory_mib, cpu_milli,   memory_mib,
            models_mask, one_island, 0xffff,         std::nullopt};
  }
  bool allows_node(size_t node) const { return !nodes || nodes->contains(node); }
};

// A place on a node. The lower (cost, tie_breaker) is better.
struct Candidate {
  double cost = 0;
  uint64_t tie_breaker = 0;
  uint16_t gpus = 0;  // bit g: GPU g
};

}  // namespace genie
