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
  std::array<GpuMask, kGpusPerNodeMax> masks{};
  int count = 0;
  const GpuMask* begin() const { return masks.data(); }
  const GpuMask* end() const { return masks.data() + count; }
};

// Fields that every decision reads come first: nodes are often not in the CPU cache.
struct alignas(64) Node {
  int free_cpu_milli = 0;
  int free_memory_mib = 0;
  int total_cpu_milli = 0;
  int total_memory_mib = 0;
  int memory_per_gpu_mib = 0;
  int gpu_count = 0;
  int gpu_model = 0;
  uint32_t tie_break_rank = 0;  // the lower one wins a tie
  uint32_t version = 0;         // grows with every change
  bool is_schedulable = true;
  bool exists = true;                 // false: the number is unused; then it is closed, too
  GpuMask schedulable_gpus = 0xffff;  // bit g: GPU g accepts placements
  // Number of requests on it: [0] fractions, [j] those of j whole GPUs.
  std::array<uint16_t, kGpusPerNodeMax + 1> held_requests_by_gpu_count{};
  std::array<Gpu, kGpusPerNodeMax> gpus;
  std::array<uint8_t, kGpusPerNodeMax> island_of_gpu{};
  std::array<uint8_t, kGpusPerNodeMax> numa_node_of_gpu{};
  GpuGroups islands;                // the GPUs of each NVLink island
  GpuGroups numa_groups;            // the GPUs of each NUMA node
  GpuGroups numa_groups_by_island;  // of each NUMA node within each island

  bool is_gpu_schedulable(int gpu) const { return (schedulable_gpus >> gpu & 1) != 0; }
  int total_free_gpu_milli() const {
    int sum = 0;
    for (int g = 0; g < gpu_count; ++g) sum += is_gpu_schedulable(g) ? gpus[g].free_milli : 0;
    return sum;
  }
  int count_free_whole_gpus() const {
    int count = 0;
    for (int g = 0; g < gpu_count; ++g)
      count += is_gpu_schedulable(g) && gpus[g].free_milli == kWholeGpuMilli;
    return count;
  }
};

// What never changes on a node and matters to a policy that learns.
struct NodeHardware {
  int gpu_model;
  int memory_per_gpu_mib;
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
  int add_request_class(const RequestClass& request);
  void drop_request_class(int number) { request_classes_.drop(number); }
  int add_node_set(const NodeSet& nodes) { return node_sets_.add(nodes); }
  void drop_node_set(int number) { node_sets_.drop(number); }
  void set_node_schedulable(int node, bool is_schedulable);
  void set_gpu_state(int node, int gpu, bool is_schedulable, int memory_used_outside_cluster_mib);
  // Records resources that are in use. Checks amounts and tenants only, not the other constraints.
  void allocate_resources(int node, int request_class, uint32_t tenant, GpuMask gpus);
  void release_resources(int node, int request_class, GpuMask gpus);

  // By number, including unused numbers.
  const std::vector<Node>& nodes() const { return nodes_; }
  const Node& node(int node) const;
  // The number of nodes with each kind of hardware.
  const std::map<NodeHardware, int>& node_counts_by_hardware() const { return node_counts_by_hardware_; }
  const RequestClass& request_class(int number) const { return request_classes_.get(number); }
  const NodeSet& node_set(int number) const { return node_sets_.get(number); }
  NodeSet all_nodes() const;
  // The log of changed nodes; a reader remembers its position. Only the last changes are kept: see
  // oldest_logged_change().
  uint64_t change_count() const { return change_count_; }
  uint64_t oldest_logged_change() const {
    return change_count_ > change_log_.size() ? change_count_ - change_log_.size() : 0;
  }
  int node_of_change(uint64_t change_number) const { return change_log_[change_number % change_log_.size()]; }

 private:
  void log_node_change(int node);

  std::vector<Node> nodes_;
  std::set<int> free_node_numbers_;
  std::map<NodeHardware, int> node_counts_by_hardware_;
  SlotTable<RequestClass> request_classes_{"request class", size_t{1} << 16};
  SlotTable<NodeSet> node_sets_{"node set", size_t{1} << 14};
  std::vector<int> change_log_ = std::vector<int>(4096);
  uint64_t change_count_ = 0;
};

// Whether the node is open, allowed, of the right model, and has enough CPU and memory.
inline bool fits_except_gpus(const Node& node, size_t number, const RequestClass& request) {
  if (!node.is_schedulable || node.free_cpu_milli < request.cpu_milli ||
      node.free_memory_mib < request.memory_mib) {
    return false;
  }
  if (request.gpu_count == 0) return request.allows_node(number);
  return request.gpu_count <= node.gpu_count && (request.allowed_gpu_models >> node.gpu_model & 1) != 0 &&
         request.allows_node(number);
}

// By the accounted amounts. Two tenants never share a GPU.
inline bool has_unallocated_capacity(const Gpu& gpu, const RequestClass& request, uint32_t tenant) {
  return gpu.free_milli >= request.milli_per_gpu && gpu.free_memory_mib >= request.memory_per_gpu_mib &&
         (gpu.tenant == 0 || gpu.tenant == tenant);
}

inline bool fits_on_gpu(const Node& node, int gpu, const RequestClass& request, uint32_t tenant) {
  return ((node.schedulable_gpus & request.allowed_gpus) >> gpu & 1) != 0 &&
         has_unallocated_capacity(node.gpus[gpu], request, tenant) &&
         node.gpus[gpu].usable_memory_mib() >= request.memory_per_gpu_mib;
}

}  // namespace genie
