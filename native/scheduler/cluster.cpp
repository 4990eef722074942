#include "cluster.h"

#include <algorithm>
#include <bit>

namespace genie {
namespace {

GpuGroups group_gpus_by(const std::array<uint8_t, kGpusMax>& number_of, int gpu_count) {
  GpuGroups groups;
  for (int number = 0; number < kGpusMax; ++number) {
    uint16_t members = 0;
    for (int g = 0; g < gpu_count; ++g) members |= static_cast<uint16_t>((number_of[g] == number) << g);
    if (members != 0) groups.masks[groups.count++] = members;
  }
  return groups;
}

GpuGroups intersect_groups(const GpuGroups& some, const GpuGroups& others) {
  GpuGroups groups;
  for (uint16_t one : some) {
    for (uint16_t other : others) {
      if ((one & other) != 0) groups.masks[groups.count++] = one & other;
    }
  }
  return groups;
}

NodeHardware hardware_of(const Node& node) { return {node.model, node.gpu_memory_mib, node.gpu_count}; }

}  // namespace

int Cluster::add_node(const Node& node) {
  const bool is_valid = node.cpu_milli >= 0 && node.memory_mib >= 0 && node.gpu_memory_mib >= 0;
  if (!is_valid || node.gpu_count < 0 || node.gpu_count > kGpusMax) {
    throw UsageError("a node must have 0 to 16 GPUs and no negative amounts");
  }
  if (node.model < 0 || node.model >= kModelsMax)
    throw UsageError("a GPU model must be a number from 0 to 63");
  Node added = node;
  added.free_cpu_milli = node.cpu_milli;
  added.free_memory_mib = node.memory_mib;
  added.held_requests = {};
  for (Gpu& gpu : added.gpus) gpu = {kWholeGpuMilli, node.gpu_memory_mib, 0, 0};
  added.islands = group_gpus_by(node.island_of_gpu, node.gpu_count);
  added.numa_groups = group_gpus_by(node.numa_node_of_gpu, node.gpu_count);
  added.numa_groups_by_island = intersect_groups(added.islands, added.numa_groups);
  const int number = next_node_number();
  if (free_numbers_.erase(number) > 0) {
    added.version = nodes_[number].version;  // versions must keep growing for readers of the previous node
    nodes_[number] = added;
  } else {
    nodes_.push_back(added);
  }
  ++hardware_counts_[hardware_of(added)];
  record_change(number);
  return number;
}

int Cluster::next_node_number() const {
  return free_numbers_.empty() ? static_cast<int>(nodes_.size()) : *free_numbers_.begin();
}

void Cluster::drop_node(int node) {
  const Node& dropped = this->node(node);
  bool is_free = dropped.free_cpu_milli == dropped.cpu_milli &&
                 dropped.free_memory_mib == dropped.memory_mib &&
                 std::run_all_concurrently(dropped.held_requests.begin(), dropped.held_requests.end(),
                             [](uint16_t count) { return count == 0; });
  if (!is_free) throw UsageError("cannot drop node " + std::to_string(node) + ": resources are held there");
  const auto hardware = hardware_counts_.find(hardware_of(dropped));
  if (--hardware->second == 0) hardware_counts_.erase(hardware);
  Node empty;
  empty.model = dropped.model;
  empty.version = dropped.version;
  empty.is_open = empty.exists = false;
  nodes_[node] = empty;
  free_numbers_.insert(node);
  node_sets_.for_each([node](NodeSet& nodes) { nodes.remove(node); });
  classes_.for_each([node](RequestClass& request) {
    if (request.nodes) request.nodes->remove(node);
  });
  record_change(node);
}

NodeSet Cluster::all_nodes() const {
  NodeSet nodes = NodeSet::first_nodes(nodes_.size());
  for (int number : free_numbers_) nodes.remove(number);
  return nodes;
}

int Cluster::add_class(const RequestClass& request) {
  if (request.gpus < 0 || request.gpus > kGpusMax)
    throw UsageError("a request must have 0 to 16 GPUs of one node");
  if (request.gpus > 0 && (request.gpu_milli < 1 || request.gpu_milli > kWholeGpuMilli)) {
    throw UsageError("the fraction of a GPU must be 1 to 1000 thousandths");
  }
  if (request.gpus == 0 && (request.gpu_milli != 0 || request.gpu_memory_mib != 0 || request.one_island)) {
    throw UsageError("a request without GPUs cannot have a GPU fraction, GPU memory or an island");
  }
  if (request.gpu_memory_mib < 0 || request.cpu_milli < 0 || request.memory_mib < 0) {
    throw UsageError("a request cannot have negative amounts");
  }
  return classes_.add(request);
}

const Node& Cluster::node(int node) const {
  if (node < 0 || node >= static_cast<int>(nodes_.size()) || !nodes_[node].exists) {
    throw UsageError("unknown node: " + std::to_string(node));
  }
  return nodes_[node];
}

void Cluster::set_open(int node, bool open) {
  if (this->node(node).is_open == open) return;
  nodes_[node].is_open = open;
  record_change(node);
}

void Cluster::set_gpu(int node, int gpu, bool open, int memory_used_outside_cluster_mib) {
  if (gpu < 0 || gpu >= this->node(node).gpu_count || memory_used_outside_cluster_mib < 0) {
    throw UsageError("node " + std::to_string(node) + " has no GPU " + std::to_string(gpu) +
                     ", or the memory is negative");
  }
  Node& changed = nodes_[node];
  if (changed.is_gpu_open(gpu) == open &&
      changed.gpus[gpu].memory_used_outside_cluster_mib == memory_used_outside_cluster_mib)
    return;
  const auto bit = static_cast<uint16_t>(1 << gpu);
  changed.open_gpus = static_cast<uint16_t>(open ? changed.open_gpus | bit : changed.open_gpus & ~bit);
  changed.gpus[gpu].memory_used_outside_cluster_mib = memory_used_outside_cluster_mib;
  record_change(node);
}

void Cluster::take(int node, int request_class, uint32_t tenant, uint16_t gpus) {
  const RequestClass& request = this->request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  this->node(node);  // throws if it does not exist
  Node& target = nodes_[node];
  bool fits = target.free_cpu_milli >= request.cpu_milli && target.free_memory_mib >= request.memory_mib &&
              count_gpus(gpus) == request.gpus && gpus >> target.gpu_count == 0;
  for (int g = 0; fits && g < target.gpu_count; ++g) {
    fits = (gpus >> g & 1) == 0 || has_unallocated_capacity(target.gpus[g], request, tenant);
  }
  if (!fits) throw UsageError("the request does not fit on node " + std::to_string(node));
  target.free_cpu_milli -= request.cpu_milli;
  target.free_memory_mib -= request.memory_mib;
  for (int g = 0; g < target.gpu_count; ++g) {
    if ((gpus >> g & 1) == 0) continue;
    target.gpus[g].free_milli -= request.gpu_milli;
    target.gpus[g].free_memory_mib -= request.gpu_memory_mib;
    target.gpus[g].tenant = tenant;
  }
  if (request.gpus > 0) ++target.held_requests[request.requests_gpu_fraction() ? 0 : request.gpus];
  record_change(node);
}

void Cluster::release(int node, int request_class, uint16_t gpus) {
  const RequestClass& request = this->request_class(request_class);
  this->node(node);  // throws if it does not exist
  Node& target = nodes_[node];
  bool is_held = count_gpus(gpus) == request.gpus && gpus >> target.gpu_count == 0 &&
                 target.free_cpu_milli + request.cpu_milli <= target.cpu_milli &&
                 target.free_memory_mib + request.memory_mib <= target.memory_mib;
  for (int g = 0; is_held && g < target.gpu_count; ++g) {
    is_held = (gpus >> g & 1) == 0 ||
              (target.gpus[g].free_milli + request.gpu_milli <= kWholeGpuMilli &&
               target.gpus[g].free_memory_mib + request.gpu_memory_mib <= target.gpu_memory_mib);
  }
  uint16_t* held =
      request.gpus > 0 ? &target.held_requests[request.requests_gpu_fraction() ? 0 : request.gpus] : nullptr;
  if (!is_held || (held != nullptr && *held == 0))
    throw UsageError("no such request is held on node " + std::to_string(node));
  if (held != nullptr) --*held;
  target.free_cpu_milli += request.cpu_milli;
  target.free_memory_mib += request.memory_mib;
  for (int g = 0; g < target.gpu_count; ++g) {
    if ((gpus >> g & 1) == 0) continue;
    target.gpus[g].free_milli += request.gpu_milli;
    target.gpus[g].free_memory_mib += request.gpu_memory_mib;
    if (target.gpus[g].free_milli == kWholeGpuMilli) target.gpus[g].tenant = 0;
  }
  record_change(node);
}

void Cluster::record_change(int node) {
  ++nodes_[node].version;
  change_log_[change_count_++ % change_log_.size()] = node;
}

}  // namespace genie
