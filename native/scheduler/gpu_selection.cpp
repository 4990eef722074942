#include "gpu_selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <tuple>

namespace genie {
namespace {

GpuMask lowest_numbered_gpus(GpuMask gpus, int count) {
  GpuMask chosen = 0;
  for (; count > 0; --count) {
    const auto bit = static_cast<GpuMask>(gpus & -gpus);
    chosen |= bit;
    gpus ^= bit;
  }
  return chosen;
}

// Islands of `fixed` first, then the smallest sufficient one, then the largest.
GpuMask choose_gpus_in_fewest_islands(const Node& node, GpuMask fixed, GpuMask equal, int count) {
  GpuMask chosen = 0;
  GpuMask left = equal;
  while (count > 0) {
    GpuMask next = 0;
    std::tuple<int, int, int> least{3, 0, 0};
    for (GpuMask island : node.islands) {
      const auto members = static_cast<GpuMask>(island & left);
      if (members == 0) continue;
      const int size = count_gpus(members);
      const int first = std::countr_zero(members);
      std::tuple<int, int, int> key{2, -size, first};
      if (size >= count) key = {1, size, first};
      if ((island & fixed) != 0) key = {0, 0, first};
      if (key < least) {
        least = key;
        next = members;
      }
    }
    const int taken = std::min(count, count_gpus(next));
    chosen |= lowest_numbered_gpus(next, taken);
    left &= static_cast<GpuMask>(~next);
    count -= taken;
  }
  return chosen;
}

// The smallest group with enough of the equal GPUs and all fixed ones; 0 if there is none.
GpuMask find_smallest_sufficient_group(const GpuGroups& groups, GpuMask fixed, GpuMask equal, int count) {
  GpuMask found = 0;
  const auto key = [](GpuMask gpus) { return std::pair(count_gpus(gpus), std::countr_zero(gpus)); };
  for (GpuMask group : groups) {
    const auto members = static_cast<GpuMask>(group & equal);
    if (members == 0 || count_gpus(members) < count || (fixed & ~group) != 0) continue;
    if (found == 0 || key(members) < key(found)) found = members;
  }
  return found;
}

// `count` of the equal GPUs, close to each other and to the fixed ones.
GpuMask choose_closest_gpus(const Node& node, GpuMask fixed, GpuMask equal, int count) {
  if (node.numa_groups_by_island.count <= 1) return lowest_numbered_gpus(equal, count);
  for (const GpuGroups* groups : {&node.numa_groups_by_island, &node.islands, &node.numa_groups}) {
    const GpuMask found = find_smallest_sufficient_group(*groups, fixed, equal, count);
    if (found != 0) return choose_gpus_in_fewest_islands(node, fixed, found, count);
  }
  return choose_gpus_in_fewest_islands(node, fixed, equal, count);
}

GpuMask choose_least_free_gpus(const Node& node, GpuMask usable, int count) {
  if (count_gpus(usable) < count) return 0;
  std::array<int, kGpusPerNodeMax> free;
  int size = 0;
  for (GpuMask left = usable; left != 0; left &= static_cast<GpuMask>(left - 1)) {
    free[size++] = node.gpus[std::countr_zero(left)].free_milli;
  }
  std::nth_element(free.begin(), free.begin() + (count - 1), free.begin() + size);
  const int limit = free[count - 1];
  GpuMask fixed = 0;
  GpuMask equal = 0;
  for (GpuMask left = usable; left != 0; left &= static_cast<GpuMask>(left - 1)) {
    const int g = std::countr_zero(left);
    if (node.gpus[g].free_milli < limit) fixed |= static_cast<GpuMask>(1 << g);
    if (node.gpus[g].free_milli == limit) equal |= static_cast<GpuMask>(1 << g);
  }
  return static_cast<GpuMask>(fixed | choose_closest_gpus(node, fixed, equal, count - count_gpus(fixed)));
}

int sum_free_milli(const Node& node, GpuMask gpus) {
  int sum = 0;
  for (; gpus != 0; gpus &= static_cast<GpuMask>(gpus - 1))
    sum += node.gpus[std::countr_zero(gpus)].free_milli;
  return sum;
}

}  // namespace

GpuMask find_usable_gpus(const Node& node, const RequestClass& request, uint32_t tenant) {
  GpuMask usable = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (fits_on_gpu(node, g, request, tenant)) usable |= static_cast<GpuMask>(1 << g);
  }
  return usable;
}

GpuMask choose_tightest_gpus(const Node& node, const RequestClass& request, uint32_t tenant) {
  if (request.gpu_count == 0) return 0;
  const GpuMask usable = find_usable_gpus(node, request, tenant);
  if (!request.needs_one_island) return choose_least_free_gpus(node, usable, request.gpu_count);
  GpuMask best = 0;
  std::pair<int, int> least;
  for (GpuMask island : node.islands) {
    const auto members = static_cast<GpuMask>(usable & island);
    const GpuMask found = choose_least_free_gpus(node, members, request.gpu_count);
    if (found == 0) continue;
    const std::pair key(sum_free_milli(node, found), count_gpus(members));
    if (best == 0 || key < least) {
      best = found;
      least = key;
    }
  }
  return best;
}

GpuMask choose_closest_gpu(const Node& node, GpuMask equal_gpus) {
  return choose_closest_gpus(node, 0, equal_gpus, 1);
}

int request_capacity(const Node& node, const RequestClass& request, uint32_t tenant) {
  int capacity = kRequestCapacityMax;
  if (request.cpu_milli > 0) capacity = std::min(capacity, node.free_cpu_milli / request.cpu_milli);
  if (request.memory_mib > 0) capacity = std::min(capacity, node.free_memory_mib / request.memory_mib);
  if (request.gpu_count == 0) return capacity;
  std::array<int, kGpusPerNodeMax> times{};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_on_gpu(node, g, request, tenant)) continue;
    times[g] = node.gpus[g].free_milli / request.milli_per_gpu;
    if (request.memory_per_gpu_mib > 0) {
      times[g] = std::min(times[g], node.gpus[g].usable_memory_mib() / request.memory_per_gpu_mib);
    }
  }
  if (!request.needs_one_island)
    return std::min(capacity, std::accumulate(times.begin(), times.end(), 0) / request.gpu_count);
  int sum = 0;
  for (GpuMask island : node.islands) {
    int in_island = 0;
    for (int g = 0; g < node.gpu_count; ++g) in_island += (island >> g & 1) * times[g];
    sum += in_island / request.gpu_count;
  }
  return std::min(capacity, sum);
}

}  // namespace genie
