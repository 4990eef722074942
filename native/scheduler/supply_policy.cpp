#include "supply_policy.h"

#include <algorithm>
#include <bit>

#include "smoothing.h"
#include "gpu_selection.h"

namespace genie {
namespace {

constexpr int kStaleChangeDivisor = 10;  // stale after a change of a tenth

// The GPUs that have the same amounts free as `gpu`.
uint16_t find_interchangeable_gpus(const Node& node, uint16_t gpus, int gpu) {
  uint16_t found = 0;
  for (; gpus != 0; gpus &= static_cast<uint16_t>(gpus - 1)) {
    const int g = std::countr_zero(gpus);
    if (node.gpus[g].free_milli == node.gpus[gpu].free_milli &&
        node.gpus[g].usable_memory_mib() == node.gpus[gpu].usable_memory_mib()) {
      found |= static_cast<uint16_t>(1 << g);
    }
  }
  return found;
}

}  // namespace

SupplyPolicy::SupplyPolicy(const Cluster& cluster, const std::vector<RequestClass>& history,
                           const SupplyOptions& options)
    : options_(options),
      tracker_(std::make_shared<SupplyTracker>(cluster, history, options.sequence_length_max)) {
  estimate_demand(cluster, history);
}

SupplyPolicy::SupplyPolicy(const SupplyPolicy& other)
    : Policy(), options_(other.options_), tracker_(other.tracker_), demand_groups_(other.demand_groups_) {}

bool SupplyPolicy::prepare(const Cluster& cluster, WorkBudget& budget) {
  if (has_weights_) return true;
  if (!tracker_->update(cluster, budget)) return false;
  compute_weights();
  has_weights_ = true;
  return true;
}

std::optional<Candidate> SupplyPolicy::evaluate(const Cluster& cluster, int number,
                                                const RequestClass& request, uint32_t tenant) {
  const Node& node = cluster.nodes()[number];
  if (!fits_except_gpus(node, number, request)) return std::nullopt;
  // Cheap checks first: most changed nodes are fuller than before.
  const bool is_one = request.gpus == 1;
  uint16_t left = is_one ? usable_gpus(node, request, tenant) : choose_tightest_gpus(node, request, tenant);
  if (request.gpus > 0 && left == 0) return std::nullopt;
  const double before = weighted_node_value(tracker_->expected_node_fill(cluster, number), node.model);
  if (!is_one) return make_candidate(node, request, left, before);
  std::optional<Candidate> best;
  uint16_t best_equal = 0;
  while (left != 0) {
    const int g = std::countr_zero(left);
    const uint16_t same = find_interchangeable_gpus(node, left, g);
    left &= static_cast<uint16_t>(~same);
    const Candidate found = make_candidate(node, request, static_cast<uint16_t>(1 << g), before);
    if (best && found.cost >= best->cost) continue;
    best = found;
    best_equal = same;
  }
  if (best) best->gpus = choose_closest_of_equal(node, best_equal);
  return best;
}

Candidate SupplyPolicy::make_candidate(const Node& node, const RequestClass& request, uint16_t gpus,
                                       double value_before) {
  const FreeState after = free_state_after(node, request, gpus);
  const double cost =
      value_before -
      (after.gpu_count == 0 ? 0 : weighted_node_value(tracker_->expected_state_fill(after), node.model));
  // Ties are broken by best fit: the least GPU left over, then the least CPU.
  const auto gpu_left = static_cast<uint64_t>(node.free_gpu_milli() - request.total_gpu_milli());
  const auto cpu_left = std::min<uint64_t>((node.free_cpu_milli - request.cpu_milli) / 16, 0xffff);
  return {cost, gpu_left << 48 | cpu_left << 32 | node.tie_break_rank, gpus};
}

double SupplyPolicy::weighted_node_value(const ExpectedNodeFill& fill, int model) const {
  double capacity = 0;
  for (size_t j = 0; j < tracker_->multi_gpu_counts().size(); ++j) {
    capacity += capacity_weights_[model][j] * static_cast<double>(fill.capacity[j]);
  }
  return fill_weights_[model] * static_cast<double>(fill.fill_milli) + options_.gamma * capacity;
}

bool SupplyPolicy::is_stale() const {
  return std::any_of(demand_groups_.begin(), demand_groups_.end(), [&](const DemandGroup& group) {
    return std::abs(current_supply(group) - group.supply) * kStaleChangeDivisor > group.supply;
  });
}

// Groups the demand, in the order of first arrival.
void SupplyPolicy::estimate_demand(const Cluster& cluster, const std::vector<RequestClass>& history) {
  int64_t requested_gpu_milli = 0;
  int64_t count = 0;
  for (const RequestClass& request : history) {
    if (request.gpus == 0) continue;
    add_demand(request.models_mask, request.gpus, kSmoothing * request.total_gpu_milli());
    if (request.gpus == 1) {
      requested_gpu_milli += request.gpu_milli;
      ++count;
    }
  }
  if (history.empty()) return;
  uint64_t models_mask = 0;
  for (const auto& [hardware, nodes] : cluster.hardware_counts())
    models_mask |= uint64_t{hardware.gpu_count > 0} << hardware.model;
  // Smoothing: half a request for each number of GPUs of any model, half a request spread over the models,
  // and half a request for one GPU of each model.
  for (int gpus : tracker_->multi_gpu_counts()) {
    if (!std::has_single_bit(static_cast<unsigned>(gpus))) continue;
    add_demand(kAnyModel, gpus, int64_t{gpus} * kWholeGpuMilli);
    for (int m = 0; m < kModelsMax; ++m) {
      if ((models_mask >> m & 1) != 0)
        add_demand(uint64_t{1} << m, gpus, int64_t{gpus} * kWholeGpuMilli / std::popcount(models_mask));
    }
  }
  for (int m = 0; m < kModelsMax; ++m) {
    if ((models_mask >> m & 1) != 0 && count > 0)
      add_demand(uint64_t{1} << m, 1, requested_gpu_milli / count);
  }
}

void SupplyPolicy::add_demand(uint64_t models_mask, int gpus, int64_t requested_gpu_milli) {
  if (!options_.by_model) models_mask = kAnyModel;
  for (DemandGroup& group : demand_groups_) {
    if (group.models_mask == models_mask && group.gpus == gpus) {
      group.requested_gpu_milli += requested_gpu_milli;
      return;
    }
  }
  demand_groups_.push_back({models_mask, gpus, requested_gpu_milli});
}

// The pressure on a model: over every group that may use it, the demand of the group divided by the supply of
// all nodes that it may use.
void SupplyPolicy::compute_weights() {
  for (DemandGroup& group : demand_groups_) {
    group.supply = current_supply(group);
    if (group.supply == 0) continue;
    const double pressure =
        static_cast<double>(group.requested_gpu_milli) / static_cast<double>(group.supply);
    for (int m = 0; m < kModelsMax; ++m) {
      if ((group.models_mask >> m & 1) == 0) continue;
      (group.gpus > 1 ? capacity_weights_[m][multi_gpu_count_index(group.gpus)] : fill_weights_[m]) +=
          pressure;
    }
  }
}

int64_t SupplyPolicy::current_supply(const DemandGroup& group) const {
  return group.gpus > 1
             ? tracker_->total_multi_gpu_capacity(group.models_mask, multi_gpu_count_index(group.gpus))
             : tracker_->total_fill_milli(group.models_mask);
}

size_t SupplyPolicy::multi_gpu_count_index(int gpus) const {
  const std::vector<int>& multi_gpu_counts = tracker_->multi_gpu_counts();
  return static_cast<size_t>(std::find(multi_gpu_counts.begin(), multi_gpu_counts.end(), gpus) -
                             multi_gpu_counts.begin());
}

}  // namespace genie
