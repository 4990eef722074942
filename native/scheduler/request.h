// What is asked for, and what is answered. A request class is registered once; requests name it by number.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "node_set.h"

namespace genie {

constexpr int kGpusMax = 16;
constexpr int kModelsMax = 64;
constexpr int kFullMilli = 1000;
constexpr uint64_t kAnyModel = ~uint64_t{0};

// How many GPUs a set has. The plain instruction set has no instruction for it, and a call costs more.
constexpr int count_of(uint16_t gpus) {
  unsigned sums = gpus - (gpus >> 1 & 0x5555u);
  sums = (sums & 0x3333u) + (sums >> 2 & 0x3333u);
  sums = (sums + (sums >> 4)) & 0x0f0fu;
  return static_cast<int>((sums + (sums >> 8)) & 0x1fu);
}

// The caller did something that is never right; Python sees genie.errors.UsageError.
struct Misuse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct RequestClass {
  int gpus = 0;            // so many different GPUs of one node
  int gpu_milli = 0;       // of each of them
  int gpu_memory_mib = 0;  // of each of them
  int cpu_milli = 0;
  int memory_mib = 0;
  uint64_t models = kAnyModel;   // bit m: a GPU of model m will do
  bool one_island = false;       // all its GPUs in one NVLink island
  uint16_t only_gpus = 0xffff;   // bit g: GPU g of a node will do
  std::optional<NodeSet> nodes;  // those that will do; none: every node
  int64_t gpu_volume() const { return int64_t{gpus} * gpu_milli; }
  bool is_fraction() const { return gpus > 0 && gpu_milli < kFullMilli; }
  RequestClass without_places() const {
    return {gpus, gpu_milli, gpu_memory_mib, cpu_milli, memory_mib, models, one_island, 0xffff, std::nullopt};
  }
  bool allows_node(size_t node) const { return !nodes || nodes->has(node); }
};

// Where a request goes: a node and a set of its GPUs. The lower (cost, tie) is the better one.
struct Candidate {
  double cost = 0;
  uint64_t tie = 0;
  uint16_t gpus = 0;  // bit g: GPU g
};

}  // namespace genie
