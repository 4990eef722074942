#include "supply_policy.h"

#include <algorithm>
#include <bit>

#include "smoothing.h"
#include "gpu_selection.h"

namespace genie {
namespace {

constexpr int kStaleChangeDivisor = 10;  // stale after a change of a tenth

// The GPUs that have the same amounts free as `gpu`.
GpuMask find_equally_free_gpus(const Node& node, GpuMask gpus, int gpu) {
  GpuMask found = 0;
  for (; gpus != 0; gpus &= static_cast<GpuMask>(gpus - 1)) {
    const int g = std::countr_zero(gpus);
    if (node.gpus[g].free_milli == node.gpus[gpu].free_milli &&
        node.gpus[g].usable_memory_mib() == node.gpus[gpu].usable_memory_mib()) {
      found |= static_cast<GpuMask>(1 << g);
    }
  }
  return found;
}

}  // namespace

SupplyPolicy::SupplyPolicy(const Cluster& cluster, const std::vector<RequestClass>& history,
                           const SupplyOptions& options)
    : options_(options),
      supply_tracker_(std::make_shared<SupplyTracker>(cluster, history, options.simulated_arrivals_max)) {
  estimate_demand(cluster, history);
}

SupplyPolicy::SupplyPolicy(const SupplyPolicy& other)
    : PlacementPolicy(),
      options_(other.options_),
      supply_tracker_(other.supply_tracker_),
      demand_groups_(other.demand_groups_) {}

bool SupplyPolicy::update_supply_and_compute_weights(const Cluster& cluster, WorkBudget& budget) {
  if (has_weights_) return true;
  if (!supply_tracker_->read_cluster_changes(cluster, budget)) return false;
  compute_weights();
  has_weights_ = true;
  return true;
}

std::optional<PlacementCandidate> SupplyPolicy::evaluate_node(const Cluster& cluster, int number,
                                                              const RequestClass& request, uint32_t tenant) {
  const Node& node = cluster.nodes()[number];
  if (!fits_except_gpus(node, number, request)) return std::nullopt;
  // Cheap checks first: most changed nodes are fuller than before.
  const bool is_one = request.gpu_count == 1;
  GpuMask left =
      is_one ? find_usable_gpus(node, request, tenant) : choose_tightest_gpus(node, request, tenant);
  if (request.gpu_count > 0 && left == 0) return std::nullopt;
  const double before =
      weighted_node_value(supply_tracker_->find_or_update_node_fill(cluster, number), node.gpu_model);
  if (!is_one) return make_candidate(node, request, left, before);
  std::optional<PlacementCandidate> best;
  GpuMask best_equal = 0;
  while (left != 0) {
    const int g = std::countr_zero(left);
    const GpuMask same = find_equally_free_gpus(node, left, g);
    left &= static_cast<GpuMask>(~same);
    const PlacementCandidate found = make_candidate(node, request, static_cast<GpuMask>(1 << g), before);
    if (best && found.cost >= best->cost) continue;
    best = found;
    best_equal = same;
  }
  if (best) best->gpus = choose_closest_gpu(node, best_equal);
  return best;
}

PlacementCandidate SupplyPolicy::make_candidate(const Node& node, const RequestClass& request, GpuMask gpus,
                                                double value_before) {
  const NodeFreeState after = node_free_state_after(node, request, gpus);
  const double cost =
      value_before -
      (after.partly_free_gpu_count == 0
           ? 0
           : weighted_node_value(supply_tracker_->find_or_simulate_fill_of_state(after), node.gpu_model));
  // Ties are broken by best fit: the least GPU left over, then the least CPU.
  const auto gpu_left = static_cast<uint64_t>(node.total_free_gpu_milli() - request.total_gpu_milli());
  const auto cpu_left = std::min<uint64_t>((node.free_cpu_milli - request.cpu_milli) / 16, 0xffff);
  return {cost, gpu_left << 48 | cpu_left << 32 | node.tie_break_rank, gpus};
}

double SupplyPolicy::weighted_node_value(const ExpectedNodeFill& fill, int model) const {
  double capacity = 0;
  for (size_t j = 0; j < supply_tracker_->multi_gpu_request_sizes().size(); ++j) {
    capacity +=
        capacity_weights_by_gpu_model_[model][j] * static_cast<double>(fill.multi_gpu_capacity_milli[j]);
  }
  return fill_weight_by_gpu_model_[model] * static_cast<double>(fill.filled_milli_total) +
         options_.multi_gpu_capacity_weight * capacity;
}

bool SupplyPolicy::are_weights_stale() const {
  return std::any_of(demand_groups_.begin(), demand_groups_.end(), [&](const DemandGroup& group) {
    return std::abs(current_supply_milli(group) - group.supply_milli_when_weighted) * kStaleChangeDivisor >
           group.supply_milli_when_weighted;
  });
}

// Groups the demand, in the order of first arrival.
void SupplyPolicy::estimate_demand(const Cluster& cluster, const std::vector<RequestClass>& history) {
  int64_t requested_gpu_milli = 0;
  int64_t count = 0;
  for (const RequestClass& request : history) {
    if (request.gpu_count == 0) continue;
    add_demand(request.allowed_gpu_models, request.gpu_count, kHalvesPerRequest * request.total_gpu_milli());
    if (request.gpu_count == 1) {
      requested_gpu_milli += request.milli_per_gpu;
      ++count;
    }
  }
  if (history.empty()) return;
  GpuModelMask gpu_models = 0;
  for (const auto& [hardware, nodes] : cluster.node_counts_by_hardware())
    gpu_models |= uint64_t{hardware.gpu_count > 0} << hardware.gpu_model;
  // Smoothing: half a request for each number of GPUs of any model, half a request spread over the models,
  // and half a request for one GPU of each model.
  for (int gpus : supply_tracker_->multi_gpu_request_sizes()) {
    if (!std::has_single_bit(static_cast<unsigned>(gpus))) continue;
    add_demand(kAnyGpuModel, gpus, int64_t{gpus} * kWholeGpuMilli);
    for (int m = 0; m < kGpuModelsMax; ++m) {
      if ((gpu_models >> m & 1) != 0)
        add_demand(uint64_t{1} << m, gpus, int64_t{gpus} * kWholeGpuMilli / std::popcount(gpu_models));
    }
  }
  for (int m = 0; m < kGpuModelsMax; ++m) {
    if ((gpu_models >> m & 1) != 0 && count > 0) add_demand(uint64_t{1} << m, 1, requested_gpu_milli / count);
  }
}

void SupplyPolicy::add_demand(GpuModelMask gpu_models, int gpus, int64_t requested_gpu_milli) {
  if (!options_.separates_gpu_models) gpu_models = kAnyGpuModel;
  for (DemandGroup& group : demand_groups_) {
    if (group.allowed_gpu_models == gpu_models && group.gpu_count == gpus) {
      group.demand_gpu_milli += requested_gpu_milli;
      return;
    }
  }
  demand_groups_.push_back({gpu_models, gpus, requested_gpu_milli});
}

// The pressure on a model: over every group that may use it, the demand of the group divided by the supply of
// all nodes that it may use.
void SupplyPolicy::compute_weights() {
  for (DemandGroup& group : demand_groups_) {
    group.supply_milli_when_weighted = current_supply_milli(group);
    if (group.supply_milli_when_weighted == 0) continue;
    const double pressure =
        static_cast<double>(group.demand_gpu_milli) / static_cast<double>(group.supply_milli_when_weighted);
    for (int m = 0; m < kGpuModelsMax; ++m) {
      if ((group.allowed_gpu_models >> m & 1) == 0) continue;
      (group.gpu_count > 1 ? capacity_weights_by_gpu_model_[m][multi_gpu_size_index(group.gpu_count)]
                           : fill_weight_by_gpu_model_[m]) += pressure;
    }
  }
}

int64_t SupplyPolicy::current_supply_milli(const DemandGroup& group) const {
  return group.gpu_count > 1 ? supply_tracker_->total_multi_gpu_capacity_milli(
                                   group.allowed_gpu_models, multi_gpu_size_index(group.gpu_count))
                             : supply_tracker_->total_fill_milli(group.allowed_gpu_models);
}

size_t SupplyPolicy::multi_gpu_size_index(int gpus) const {
  const std::vector<int>& multi_gpu_request_sizes = supply_tracker_->multi_gpu_request_sizes();
  return static_cast<size_t>(std::find(multi_gpu_request_sizes.begin(), multi_gpu_request_sizes.end(), gpus) -
                             multi_gpu_request_sizes.begin());
}

}  // namespace genie
