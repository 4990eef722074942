#include "cluster.h"

#include <algorithm>
#include <bit>

namespace genie {

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
  for (Gpu& gpu : added.gpus) gpu = {kFullMilli, node.gpu_memory_mib, 0};
  const auto same = [&](const Kind& kind) {
    return kind.model == node.model && kind.gpu_memory_mib == node.gpu_memory_mib;
  };
  const auto found = std::find_if(kinds_.begin(), kinds_.end(), same);
  added.kind = static_cast<int>(found - kinds_.begin());
  if (found == kinds_.end()) kinds_.push_back({node.model, node.gpu_memory_mib});
  nodes_.push_back(added);
  const int number = static_cast<int>(nodes_.size()) - 1;
  note_change(number);
  return number;
}

int Cluster::add_class(const RequestClass& wanted) {
  if (wanted.gpus < 0 || wanted.gpus > kGpusMax) throw Misuse("a request has 0 to 16 GPUs of one node");
  if (wanted.gpus > 0 && (wanted.gpu_milli < 1 || wanted.gpu_milli > kFullMilli)) {
    throw Misuse("the share of a GPU is 1 to 1000 thousandths");
  }
  if (wanted.gpus == 0 && (wanted.gpu_milli != 0 || wanted.gpu_memory_mib != 0)) {
    throw Misuse("a request without GPUs has no share and no memory of them");
  }
  if (wanted.gpu_memory_mib < 0 || wanted.cpu_milli < 0 || wanted.memory_mib < 0) {
    throw Misuse("no amount of a request is negative");
  }
  classes_.push_back(wanted);
  return static_cast<int>(classes_.size()) - 1;
}

const Node& Cluster::node(int node) const {
  if (node < 0 || node >= static_cast<int>(nodes_.size())) throw Misuse("there is no such node");
  return nodes_[node];
}

const RequestClass& Cluster::request_class(int number) const {
  if (number < 0 || number >= static_cast<int>(classes_.size()))
    throw Misuse("there is no such request class");
  return classes_[number];
}

void Cluster::set_open(int node, bool open) {
  if (this->node(node).open == open) return;
  nodes_[node].open = open;
  note_change(node);
}

void Cluster::take(int node, int request_class, uint32_t tenant, uint16_t gpus) {
  const RequestClass& wanted = this->request_class(request_class);
  if (tenant == 0) throw Misuse("tenants are numbers from 1");
  this->node(node);  // throws when there is none
  Node& target = nodes_[node];
  bool fits = fits_beside_gpus(target, node, wanted) && std::popcount(gpus) == wanted.gpus &&
              gpus >> target.gpu_count == 0;
  for (int g = 0; fits && g < target.gpu_count; ++g) {
    fits = (gpus >> g & 1) == 0 || fits_gpu(target.gpus[g], wanted, tenant);
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
  bool was_taken = std::popcount(gpus) == wanted.gpus && gpus >> target.gpu_count == 0 &&
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

uint16_t tightest_gpus(const Node& node, const RequestClass& wanted, uint32_t tenant) {
  uint16_t chosen = 0;
  for (int left = wanted.gpus; left > 0; --left) {
    int best = -1;
    for (int g = 0; g < node.gpu_count; ++g) {
      if ((chosen >> g & 1) != 0 || !fits_gpu(node.gpus[g], wanted, tenant)) continue;
      if (best < 0 || node.gpus[g].free_milli < node.gpus[best].free_milli) best = g;
    }
    if (best < 0) return 0;
    chosen = static_cast<uint16_t>(chosen | 1 << best);
  }
  return chosen;
}

}  // namespace genie
