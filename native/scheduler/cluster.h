// The nodes and what is free on them. Not for: choosing among them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <vector>

#include "numbered.h"
#include "request.h"

namespace genie {

// What is free is what is accounted for.
struct Gpu {
  int free_milli = kFullMilli;
  int free_memory_mib = 0;
  uint32_t tenant = 0;         // whose requests are on it; 0: nobody's
  int memory_outside_mib = 0;  // used by processes outside of the cluster
  int usable_memory_mib() const { return std::max(free_memory_mib - memory_outside_mib, 0); }
};

// Sets of GPUs that have something in common; each is a number with a bit for each GPU.
struct GpuGroups {
  std::array<uint16_t, kGpusMax> sets{};
  int count = 0;
  const uint16_t* begin() const { return sets.data(); }
  const uint16_t* end() const { return sets.data() + count; }
};

// What every decision touches comes first: nodes are often not in the cache.
struct alignas(64) Node {
  int free_cpu_milli = 0;
  int free_memory_mib = 0;
  int cpu_milli = 0;
  int memory_mib = 0;
  int gpu_memory_mib = 0;  // of each of its GPUs
  int gpu_count = 0;
  int model = 0;
  uint32_t rank = 0;     // the lower one wins a tie
  uint32_t version = 0;  // grows with every change
  bool open = true;
  bool there = true;            // false: the number is nobody's; then it is closed, too
  uint16_t open_gpus = 0xffff;  // bit g: something may be placed on GPU g
  // How many requests are on it: [0] fractions, [j] those of j whole GPUs.
  std::array<uint16_t, kGpusMax + 1> held{};
  std::array<Gpu, kGpusMax> gpus;
  std::array<uint8_t, kGpusMax> island_of{};
  std::array<uint8_t, kGpusMax> numa_of{};
  GpuGroups islands;  // the GPUs of each NVLink island
  GpuGroups numas;    // of each NUMA node
  GpuGroups corners;  // of each NUMA node in each island

  bool gpu_open(int gpu) const { return (open_gpus >> gpu & 1) != 0; }
  int free_gpu_milli() const {
    int sum = 0;
    for (int g = 0; g < gpu_count; ++g) sum += gpu_open(g) ? gpus[g].free_milli : 0;
    return sum;
  }
  int whole_gpus() const {
    int count = 0;
    for (int g = 0; g < gpu_count; ++g) count += gpu_open(g) && gpus[g].free_milli == kFullMilli;
    return count;
  }
};

class Cluster {
 public:
  // Its free parts, groups and holds are set here. Numbers that were given back are given out first.
  int add_node(const Node& node);
  int next_number() const;
  // Nothing may be held there. Sets and classes that had it have it no longer.
  void drop_node(int node);
  int add_class(const RequestClass& wanted);
  void drop_class(int number) { classes_.drop(number); }
  int add_set(const NodeSet& nodes) { return sets_.add(nodes); }
  void drop_set(int number) { sets_.drop(number); }
  void set_open(int node, bool open);
  void set_gpu(int node, int gpu, bool open, int memory_outside_mib);
  // About what is there: it minds amounts and tenants, and nothing else that choosing minds.
  void take(int node, int request_class, uint32_t tenant, uint16_t gpus);
  void release(int node, int request_class, uint16_t gpus);

  // By number, those that are not there too.
  const std::vector<Node>& nodes() const { return nodes_; }
  const Node& node(int node) const;
  const RequestClass& request_class(int number) const { return classes_.get(number); }
  const NodeSet& node_set(int number) const { return sets_.get(number); }
  NodeSet all_nodes() const;
  // Node numbers in the order of their changes, from the beginning; a reader remembers how far it has read.
  // Only the last changes are kept: see changes_kept_from().
  uint64_t changes() const { return changes_; }
  uint64_t changes_kept_from() const { return changes_ > log_.size() ? changes_ - log_.size() : 0; }
  int changed(uint64_t number) const { return log_[number % log_.size()]; }

 private:
  void note_change(int node);

  std::vector<Node> nodes_;
  std::set<int> free_numbers_;
  Numbered<RequestClass> classes_{"request class", size_t{1} << 16};
  Numbered<NodeSet> sets_{"node set", size_t{1} << 14};
  std::vector<int> log_ = std::vector<int>(4096);
  uint64_t changes_ = 0;
};

// Everything but the GPUs themselves: is it open, allowed, of the right model, with CPU and memory enough?
inline bool fits_beside_gpus(const Node& node, size_t number, const RequestClass& wanted) {
  if (!node.open || node.free_cpu_milli < wanted.cpu_milli || node.free_memory_mib < wanted.memory_mib) {
    return false;
  }
  if (wanted.gpus == 0) return wanted.allows_node(number);
  return wanted.gpus <= node.gpu_count && (wanted.models >> node.model & 1) != 0 &&
         wanted.allows_node(number);
}

// As accounted for. Two tenants never share a GPU.
inline bool has_room(const Gpu& gpu, const RequestClass& wanted, uint32_t tenant) {
  return gpu.free_milli >= wanted.gpu_milli && gpu.free_memory_mib >= wanted.gpu_memory_mib &&
         (gpu.tenant == 0 || gpu.tenant == tenant);
}

inline bool fits_gpu(const Node& node, int gpu, const RequestClass& wanted, uint32_t tenant) {
  return ((node.open_gpus & wanted.only_gpus) >> gpu & 1) != 0 && has_room(node.gpus[gpu], wanted, tenant) &&
         node.gpus[gpu].usable_memory_mib() >= wanted.gpu_memory_mib;
}

}  // namespace genie
