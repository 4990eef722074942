#include "cluster.h"

#include <algorithm>
#include <bit>

namespace genie {
namespace {

GpuGroups group_gpus_by_number(const std::array<uint8_t, kGpusPerNodeMax>& number_of_gpu, int gpu_count) {
  GpuGroups groups;
  for (int number = 0; number < kGpusPerNodeMax; ++number) {
    GpuMask members = 0;
    for (int g = 0; g < gpu_count; ++g) members |= static_cast<GpuMask>((number_of_gpu[g] == number) << g);
    if (members != 0) groups.masks[groups.count++] = members;
  }
  return groups;
}

GpuGroups intersect_groups(const GpuGroups& some, const GpuGroups& others) {
  GpuGroups groups;
  for (GpuMask one : some) {
    for (GpuMask other : others) {
      if ((one & other) != 0) groups.masks[groups.count++] = one & other;
    }
  }
  return groups;
}

NodeHardware hardware_of(const Node& node) {
  return {node.gpu_model, node.memory_per_gpu_mib, node.gpu_count};
}

}  // namespace

int Cluster::add_node(const Node& node) {
  const bool is_valid =
      node.total_cpu_milli >= 0 && node.total_memory_mib >= 0 && node.memory_per_gpu_mib >= 0;
  if (!is_valid || node.gpu_count < 0 || node.gpu_count > kGpusPerNodeMax) {
    throw UsageError("a node must have 0 to 16 GPUs and no negative amounts");
  }
  if (node.gpu_model < 0 || node.gpu_model >= kGpuModelsMax)
    throw UsageError("a GPU model must be a number from 0 to 63");
  Node added = node;
  added.free_cpu_milli = node.total_cpu_milli;
  added.free_memory_mib = node.total_memory_mib;
  added.held_requests_by_gpu_count = {};
  for (Gpu& gpu : added.gpus) gpu = {kWholeGpuMilli, node.memory_per_gpu_mib, 0, 0};
  added.islands = group_gpus_by_number(node.island_of_gpu, node.gpu_count);
  added.numa_groups = group_gpus_by_number(node.numa_node_of_gpu, node.gpu_count);
  added.numa_groups_by_island = intersect_groups(added.islands, added.numa_groups);
  const int number = next_node_number();
  if (free_node_numbers_.erase(number) > 0) {
    added.version = nodes_[number].version;  // versions must keep growing for readers of the previous node
    nodes_[number] = added;
  } else {
    nodes_.push_back(added);
  }
  ++node_counts_by_hardware_[hardware_of(added)];
  log_node_change(number);
  return number;
}

int Cluster::next_node_number() const {
  return free_node_numbers_.empty() ? static_cast<int>(nodes_.size()) : *free_node_numbers_.begin();
}

void Cluster::drop_node(int node) {
  const Node& dropped = this->node(node);
  bool is_free =
      dropped.free_cpu_milli == dropped.total_cpu_milli &&
      dropped.free_memory_mib == dropped.total_memory_mib &&
      std::all_of(dropped.held_requests_by_gpu_count.begin(), dropped.held_requests_by_gpu_count.end(),
                  [](uint16_t count) { return count == 0; });
  if (!is_free) throw UsageError("cannot drop node " + std::to_string(node) + ": resources are held there");
  const auto hardware = node_counts_by_hardware_.find(hardware_of(dropped));
  if (--hardware->second == 0) node_counts_by_hardware_.erase(hardware);
  Node empty;
  empty.gpu_model = dropped.gpu_model;
  empty.version = dropped.version;
  empty.is_schedulable = empty.exists = false;
  nodes_[node] = empty;
  free_node_numbers_.insert(node);
  node_sets_.for_each([node](NodeSet& nodes) { nodes.remove(node); });
  request_classes_.for_each([node](RequestClass& request) {
    if (request.allowed_nodes) request.allowed_nodes->remove(node);
  });
  log_node_change(node);
}

NodeSet Cluster::all_nodes() const {
  NodeSet nodes = NodeSet::first_nodes(nodes_.size());
  for (int number : free_node_numbers_) nodes.remove(number);
  return nodes;
}

int Cluster::add_request_class(const RequestClass& request) {
  if (request.gpu_count < 0 || request.gpu_count > kGpusPerNodeMax)
    throw UsageError("a request must have 0 to 16 GPUs of one node");
  if (request.gpu_count > 0 && (request.milli_per_gpu < 1 || request.milli_per_gpu > kWholeGpuMilli)) {
    throw UsageError("the fraction of a GPU must be 1 to 1000 thousandths");
  }
  if (request.gpu_count == 0 &&
      (request.milli_per_gpu != 0 || request.memory_per_gpu_mib != 0 || request.needs_one_island)) {
    throw UsageError("a request without GPUs cannot have a GPU fraction, GPU memory or an island");
  }
  if (request.memory_per_gpu_mib < 0 || request.cpu_milli < 0 || request.memory_mib < 0) {
    throw UsageError("a request cannot have negative amounts");
  }
  return request_classes_.add(request);
}

const Node& Cluster::node(int node) const {
  if (node < 0 || node >= static_cast<int>(nodes_.size()) || !nodes_[node].exists) {
    throw UsageError("unknown node: " + std::to_string(node));
  }
  return nodes_[node];
}

void Cluster::set_node_schedulable(int node, bool is_schedulable) {
  if (this->node(node).is_schedulable == is_schedulable) return;
  nodes_[node].is_schedulable = is_schedulable;
  log_node_change(node);
}

void Cluster::set_gpu_state(int node, int gpu, bool is_schedulable, int memory_used_outside_cluster_mib) {
  if (gpu < 0 || gpu >= this->node(node).gpu_count || memory_used_outside_cluster_mib < 0) {
    throw UsageError("node " + std::to_string(node) + " has no GPU " + std::to_string(gpu) +
                     ", or the memory is negative");
  }
  Node& changed = nodes_[node];
  if (changed.is_gpu_schedulable(gpu) == is_schedulable &&
      changed.gpus[gpu].memory_used_outside_cluster_mib == memory_used_outside_cluster_mib)
    return;
  const auto bit = static_cast<GpuMask>(1 << gpu);
  changed.schedulable_gpus =
      static_cast<GpuMask>(is_schedulable ? changed.schedulable_gpus | bit : changed.schedulable_gpus & ~bit);
  changed.gpus[gpu].memory_used_outside_cluster_mib = memory_used_outside_cluster_mib;
  log_node_change(node);
}

void Cluster::allocate_resources(int node, int request_class, uint32_t tenant, GpuMask gpus) {
  const RequestClass& request = this->request_class(request_class);
  if (tenant == 0) throw UsageError("a tenant must be a number from 1");
  this->node(node);  // throws if it does not exist
  Node& target = nodes_[node];
  bool fits = target.free_cpu_milli >= request.cpu_milli && target.free_memory_mib >= request.memory_mib &&
              count_gpus(gpus) == request.gpu_count && gpus >> target.gpu_count == 0;
  for (int g = 0; fits && g < target.gpu_count; ++g) {
    fits = (gpus >> g & 1) == 0 || has_unallocated_capacity(target.gpus[g], request, tenant);
  }
  if (!fits) throw UsageError("the request does not fit on node " + std::to_string(node));
  target.free_cpu_milli -= request.cpu_milli;
  target.free_memory_mib -= request.memory_mib;
  for (int g = 0; g < target.gpu_count; ++g) {
    if ((gpus >> g & 1) == 0) continue;
    target.gpus[g].free_milli -= request.milli_per_gpu;
    target.gpus[g].free_memory_mib -= request.memory_per_gpu_mib;
    target.gpus[g].tenant = tenant;
  }
  if (request.gpu_count > 0)
    ++target.held_requests_by_gpu_count[request.requests_gpu_fraction() ? 0 : request.gpu_count];
  log_node_change(node);
}

void Cluster::release_resources(int node, int request_class, GpuMask gpus) {
  const RequestClass& request = this->request_class(request_class);
  this->node(node);  // throws if it does not exist
  Node& target = nodes_[node];
  bool is_held = count_gpus(gpus) == request.gpu_count && gpus >> target.gpu_count == 0 &&
                 target.free_cpu_milli + request.cpu_milli <= target.total_cpu_milli &&
                 target.free_memory_mib + request.memory_mib <= target.total_memory_mib;
  for (int g = 0; is_held && g < target.gpu_count; ++g) {
    is_held = (gpus >> g & 1) == 0 ||
              (target.gpus[g].free_milli + request.milli_per_gpu <= kWholeGpuMilli &&
               target.gpus[g].free_memory_mib + request.memory_per_gpu_mib <= target.memory_per_gpu_mib);
  }
  uint16_t* held =
      request.gpu_count > 0
          ? &target.held_requests_by_gpu_count[request.requests_gpu_fraction() ? 0 : request.gpu_count]
          : nullptr;
  if (!is_held || (held != nullptr && *held == 0))
    throw UsageError("no such request is held on node " + std::to_string(node));
  if (held != nullptr) --*held;
  target.free_cpu_milli += request.cpu_milli;
  target.free_memory_mib += request.memory_mib;
  for (int g = 0; g < target.gpu_count; ++g) {
    if ((gpus >> g & 1) == 0) continue;
    target.gpus[g].free_milli += request.milli_per_gpu;
    target.gpus[g].free_memory_mib += request.memory_per_gpu_mib;
    if (target.gpus[g].free_milli == kWholeGpuMilli) target.gpus[g].tenant = 0;
  }
  log_node_change(node);
}

void Cluster::log_node_change(int node) {
  ++nodes_[node].version;
  change_log_[change_count_++ % change_log_.size()] = node;
}

}  // namespace genie
