// The nodes and what is free on them. Does not choose among them.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "slot_table.h"
#include "request.h"

namespace genie {

// Free amounts are as accounted for.
struct Gpu {
  int free_milli = kWholeGpuMilli;
  int free_memory_mib = 0;
  uint32_t tenant = 0;                      // of the requests on it; 0: none
  int memory_used_outside_cluster_mib = 0;  // used by processes outside the cluster
  int usable_memory_mib() const { return std::max(free_memory_mib - memory_used_outside_cluster_mib, 0); }
};

// Groups of GPUs with something in common; each is a bit mask.
struct GpuGroups {
  std::array<uint16_t, kGpusMax> masks{};
  int count = 0;
  const uint16_t* begin() const { return masks.data(); }
  const uint16_t* end() const { return masks.data() + count; }
};

// Fields that every decision reads come first: nodes are often not in the CPU cache.
struct alignas(64) Node {
  int free_cpu_milli = 0;
  int free_memory_mib = 0;
  int cpu_milli = 0;
  int memory_mib = 0;
  int gpu_memory_mib = 0;  // per GPU
  int gpu_count = 0;
  int model = 0;
  uint32_t tie_break_rank = 0;  // the lower one wins a tie
  uint32_t version = 0;         // grows with every change
  bool is_open = true;
  bool exists = true;           // false: the number is unused; then it is closed, too
  uint16_t open_gpus = 0xffff;  // bit g: GPU g accepts placements
  // Number of requests on it: [0] fractions, [j] those of j whole GPUs.
  std::array<uint16_t, kGpusMax + 1> held_requests{};
  std::array<Gpu, kGpusMax> gpus;
  std::array<uint8_t, kGpusMax> island_of_gpu{};
  std::array<uint8_t, kGpusMax> numa_node_of_gpu{};
  GpuGroups islands;                // the GPUs of each NVLink island
  GpuGroups numa_groups;            // the GPUs of each NUMA node
  GpuGroups numa_groups_by_island;  // of each NUMA node within each island

  bool is_gpu_open(int gpu) const { return (open_gpus >> gpu & 1) != 0; }
  int free_gpu_milli() const {
    int sum = 0;
    for (int g = 0; g < gpu_count; ++g) sum += is_gpu_open(g) ? gpus[g].free_milli : 0;
    return sum;
  }
  int count_free_whole_gpus() const {
    int count = 0;
    for (int g = 0; g < gpu_count; ++g) count += is_gpu_open(g) && gpus[g].free_milli == kWholeGpuMilli;
    return count;
  }
};

// What never changes on a node and matters to a policy that learns.
struct NodeHardware {
  int model;
  int gpu_memory_mib;
  int gpu_count;
  auto operator<=>(const NodeHardware&) const = default;
};

class Cluster {
 public:
  // Sets its free amounts, groups and holds. The lowest free number is reused first.
  int add_node(const Node& node);
  int next_node_number() const;
  // Nothing may be held there. Removes it from node sets and request classes.
  void drop_node(int node);
  int add_class(const RequestClass& request);
  void drop_class(int number) { classes_.drop(number); }
  int add_node_set(const NodeSet& nodes) { return node_sets_.add(nodes); }
  void drop_node_set(int number) { node_sets_.drop(number); }
  void set_open(int node, bool open);
  void set_gpu(int node, int gpu, bool open, int memory_used_outside_cluster_mib);
  // Records resources that are in use. Checks amounts and tenants only, not the other constraints.
  void take(int node, int request_class, uint32_t tenant, uint16_t gpus);
  void release(int node, int request_class, uint16_t gpus);

  // By number, including unused numbers.
  const std::vector<Node>& nodes() const { return nodes_; }
  const Node& node(int node) const;
  // The number of nodes with each kind of hardware.
  const std::map<NodeHardware, int>& hardware_counts() const { return hardware_counts_; }
  const RequestClass& request_class(int number) const { return classes_.get(number); }
  const NodeSet& node_set(int number) const { return node_sets_.get(number); }
  NodeSet all_nodes() const;
  // The log of changed nodes; a reader remembers its position. Only the last changes are kept: see
  // oldest_kept_change().
  uint64_t change_count() const { return change_count_; }
  uint64_t oldest_kept_change() const {
    return change_count_ > change_log_.size() ? change_count_ - change_log_.size() : 0;
  }
  int changed_node(uint64_t number) const { return change_log_[number % change_log_.size()]; }

 private:
  void record_change(int node);

  std::vector<Node> nodes_;
  std::set<int> free_numbers_;
  std::map<NodeHardware, int> hardware_counts_;
  SlotTable<RequestClass> classes_{"request class", size_t{1} << 16};
  SlotTable<NodeSet> node_sets_{"node set", size_t{1} << 14};
  std::vector<int> change_log_ = std::vector<int>(4096);
  uint64_t change_count_ = 0;
};

// Whether the node is open, allowed, of the right model, and has enough CPU and memory.
inline bool fits_except_gpus(const Node& node, size_t number, const RequestClass& request) {
  if (!node.is_open || node.free_cpu_milli < request.cpu_milli || node.free_memory_mib < request.memory_mib) {
    return false;
  }
  if (request.gpus == 0) return request.allows_node(number);
  return request.gpus <= node.gpu_count && (request.models_mask >> node.model & 1) != 0 &&
         request.allows_node(number);
}

// By the accounted amounts. Two tenants never share a GPU.
inline bool has_unallocated_capacity(const Gpu& gpu, const RequestClass& request, uint32_t tenant) {
  return gpu.free_milli >= request.gpu_milli && gpu.free_memory_mib >= request.gpu_memory_mib &&
         (gpu.tenant == 0 || gpu.tenant == tenant);
}

inline bool fits_on_gpu(const Node& node, int gpu, const RequestClass& request, uint32_t tenant) {
  return ((node.open_gpus & request.only_gpus) >> gpu & 1) != 0 &&
         has_unallocated_capacity(node.gpus[gpu], request, tenant) &&
         node.gpus[gpu].usable_memory_mib() >= request.gpu_memory_mib;
}

}  // namespace genie
