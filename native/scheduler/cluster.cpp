#include "cluster.h"

#include <algorithm>
#include <bit>

namespace genie {
namespace {

GpuGroups groups_by(const std::array<uint8_t, kGpusMax>& number_of, int gpu_count) {
  GpuGroups groups;
  for (int number = 0; number < kGpusMax; ++number) {
    uint16_t members = 0;
    for (int g = 0; g < gpu_count; ++g) members |= static_cast<uint16_t>((number_of[g] == number) << g);
    if (members != 0) groups.sets[groups.count++] = members;
  }
  return groups;
}

GpuGroups crossed(const GpuGroups& some, const GpuGroups& others) {
  GpuGroups groups;
  for (uint16_t one : some) {
    for (uint16_t other : others) {
      if ((one & other) != 0) groups.sets[groups.count++] = one & other;
    }
  }
  return groups;
}

}  // namespace

int Cluster::add_node(const Node& node) {
  const bool sane = node.cpu_milli >= 0 && node.memory_mib >= 0 && node.gpu_memory_mib >= 0;
  if (!sane || node.gpu_count < 0 || node.gpu_count > kGpusMax) {
    throw Misuse("a node has 0 to 16 GPUs, and no amount of it is negative");
  }
  if (node.model < 0 || node.model >= kModelsMax) throw Misuse("a GPU model is a number from 0 to 63");
  Node added = node;
  added.free_cpu_milli = node.cpu_milli;
  added.free_memory_mib = node.memory_mib;
  added.held = {};
  for (Gpu& gpu : added.gpus) gpu = {kFullMilli, node.gpu_memory_mib, 0, 0};
  added.islands = groups_by(node.island_of, node.gpu_count);
  added.numas = groups_by(node.numa_of, node.gpu_count);
  added.corners = crossed(added.islands, added.numas);
  const int number = next_number();
  if (free_numbers_.erase(number) > 0) {
    added.version = nodes_[number].version;  // who knows the one before must see that it is another
    nodes_[number] = added;
  } else {
    nodes_.push_back(added);
  }
  note_change(number);
  return number;
}

int Cluster::next_number() const {
  return free_numbers_.empty() ? static_cast<int>(nodes_.size()) : *free_numbers_.begin();
}

void Cluster::drop_node(int node) {
  const Node& dropped = this->node(node);
  bool is_free =
      dropped.free_cpu_milli == dropped.cpu_milli && dropped.free_memory_mib == dropped.memory_mib &&
      std::all_of(dropped.held.begin(), dropped.held.end(), [](uint16_t count) { return count == 0; });
  if (!is_free) throw Misuse("something is held there");
  Node nobody;
  nobody.model = dropped.model;
  nobody.version = dropped.version;
  nobody.open = nobody.there = false;
  nodes_[node] = nobody;
  free_numbers_.insert(node);
  sets_.change([node](NodeSet& nodes) { nodes.remove(node); });
  classes_.change([node](RequestClass& wanted) {
    if (wanted.nodes) wanted.nodes->remove(node);
  });
  note_change(node);
}

NodeSet Cluster::all_nodes() const {
  NodeSet nodes = NodeSet::up_to(nodes_.size());
  for (int number : free_numbers_) nodes.remove(number);
  return nodes;
}

int Cluster::add_class(const RequestClass& wanted) {
  if (wanted.gpus < 0 || wanted.gpus > kGpusMax) throw Misuse("a request has 0 to 16 GPUs of one node");
  if (wanted.gpus > 0 && (wanted.gpu_milli < 1 || wanted.gpu_milli > kFullMilli)) {
    throw Misuse("the share of a GPU is 1 to 1000 thousandths");
  }
  if (wanted.gpus == 0 && (wanted.gpu_milli != 0 || wanted.gpu_memory_mib != 0 || wanted.one_island)) {
    throw Misuse("a request without GPUs has no share, no memory and no island of them");
  }
  if (wanted.gpu_memory_mib < 0 || wanted.cpu_milli < 0 || wanted.memory_mib < 0) {
    throw Misuse("no amount of a request is negative");
  }
  return classes_.add(wanted);
}

const Node& Cluster::node(int node) const {
  if (node < 0 || node >= static_cast<int>(nodes_.size()) || !nodes_[node].there) {
    throw Misuse("there is no such node");
  }
  return nodes_[node];
}

void Cluster::set_open(int node, bool open) {
  if (this->node(node).open == open) return;
  nodes_[node].open = open;
  note_change(node);
}

void Cluster::set_gpu(int node, int gpu, bool open, int memory_outside_mib) {
  if (gpu < 0 || gpu >= this->node(node).gpu_count || memory_outside_mib < 0) {
    throw Misuse("there is no such GPU, or memory is negative");
  }
  Node& changed = nodes_[node];
  if (changed.gpu_open(gpu) == open && changed.gpus[gpu].memory_outside_mib == memory_outside_mib) return;
  const auto bit = static_cast<uint16_t>(1 << gpu);
  changed.open_gpus = static_cast<uint16_t>(open ? changed.open_gpus | bit : changed.open_gpus & ~bit);
  changed.gpus[gpu].memory_outside_mib = memory_outside_mib;
  note_change(node);
}

void Cluster::take(int node, int request_class, uint32_t tenant, uint16_t gpus) {
  const RequestClass& wanted = this->request_class(request_class);
  if (tenant == 0) throw Misuse("tenants are numbers from 1");
  this->node(node);  // throws when there is none
  Node& target = nodes_[node];
  bool fits = target.free_cpu_milli >= wanted.cpu_milli && target.free_memory_mib >= wanted.memory_mib &&
              count_of(gpus) == wanted.gpus && gpus >> target.gpu_count == 0;
  for (int g = 0; fits && g < target.gpu_count; ++g) {
    fits = (gpus >> g & 1) == 0 || has_room(target.gpus[g], wanted, tenant);
  }
  if (!fits) throw Misuse("the request does not fit there");
  target.free_cpu_milli -= wanted.cpu_milli;
  target.free_memory_mib -= wanted.memory_mib;
  for (int g = 0; g < target.gpu_count; ++g) {
    if ((gpus >> g & 1) == 0) continue;
    target.gpus[g].free_milli -= wanted.gpu_milli;
    target.gpus[g].free_memory_mib -= wanted.gpu_memory_mib;
    target.gpus[g].tenant = tenant;
  }
  if (wanted.gpus > 0) ++target.held[wanted.is_fraction() ? 0 : wanted.gpus];
  note_change(node);
}

void Cluster::release(int node, int request_class, uint16_t gpus) {
  const RequestClass& wanted = this->request_class(request_class);
  this->node(node);  // throws when there is none
  Node& target = nodes_[node];
  bool was_taken = count_of(gpus) == wanted.gpus && gpus >> target.gpu_count == 0 &&
                   target.free_cpu_milli + wanted.cpu_milli <= target.cpu_milli &&
                   target.free_memory_mib + wanted.memory_mib <= target.memory_mib;
  for (int g = 0; was_taken && g < target.gpu_count; ++g) {
    was_taken = (gpus >> g & 1) == 0 ||
                (target.gpus[g].free_milli + wanted.gpu_milli <= kFullMilli &&
                 target.gpus[g].free_memory_mib + wanted.gpu_memory_mib <= target.gpu_memory_mib);
  }
  uint16_t* held = wanted.gpus > 0 ? &target.held[wanted.is_fraction() ? 0 : wanted.gpus] : nullptr;
  if (!was_taken || (held != nullptr && *held == 0)) throw Misuse("nothing like that was taken there");
  if (held != nullptr) --*held;
  target.free_cpu_milli += wanted.cpu_milli;
  target.free_memory_mib += wanted.memory_mib;
  for (int g = 0; g < target.gpu_count; ++g) {
    if ((gpus >> g & 1) == 0) continue;
    target.gpus[g].free_milli += wanted.gpu_milli;
    target.gpus[g].free_memory_mib += wanted.gpu_memory_mib;
    if (target.gpus[g].free_milli == kFullMilli) target.gpus[g].tenant = 0;
  }
  note_change(node);
}

void Cluster::note_change(int node) {
  ++nodes_[node].version;
  log_[changes_++ % log_.size()] = node;
}

}  // namespace genie
