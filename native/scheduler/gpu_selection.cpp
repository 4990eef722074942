#include "gpu_selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <tuple>

namespace genie {
namespace {

uint16_t lowest_numbered_gpus(uint16_t gpus, int count) {
  uint16_t chosen = 0;
  for (; count > 0; --count) {
    const auto bit = static_cast<uint16_t>(gpus & -gpus);
    chosen |= bit;
    gpus ^= bit;
  }
  return chosen;
}

// Islands of `fixed` first, then the smallest sufficient one, then the largest.
uint16_t choose_in_fewest_islands(const Node& node, uint16_t fixed, uint16_t equal, int count) {
  uint16_t chosen = 0;
  uint16_t left = equal;
  while (count > 0) {
    uint16_t next = 0;
    std::tuple<int, int, int> least{3, 0, 0};
    for (uint16_t island : node.islands) {
      const auto members = static_cast<uint16_t>(island & left);
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
    left &= static_cast<uint16_t>(~next);
    count -= taken;
  }
  return chosen;
}

// The smallest group with enough of the equal GPUs and all fixed ones; 0 if there is none.
uint16_t smallest_sufficient_group(const GpuGroups& groups, uint16_t fixed, uint16_t equal, int count) {
  uint16_t found = 0;
  const auto key = [](uint16_t gpus) { return std::pair(count_gpus(gpus), std::countr_zero(gpus)); };
  for (uint16_t group : groups) {
    const auto members = static_cast<uint16_t>(group & equal);
    if (members == 0 || count_gpus(members) < count || (fixed & ~group) != 0) continue;
    if (found == 0 || key(members) < key(found)) found = members;
  }
  return found;
}

// `count` of the equal GPUs, close to each other and to the fixed ones.
uint16_t choose_closest(const Node& node, uint16_t fixed, uint16_t equal, int count) {
  if (node.numa_groups_by_island.count <= 1) return lowest_numbered_gpus(equal, count);
  for (const GpuGroups* groups : {&node.numa_groups_by_island, &node.islands, &node.numa_groups}) {
    const uint16_t found = smallest_sufficient_group(*groups, fixed, equal, count);
    if (found != 0) return choose_in_fewest_islands(node, fixed, found, count);
  }
  return choose_in_fewest_islands(node, fixed, equal, count);
}

uint16_t choose_tightest(const Node& node, uint16_t usable, int count) {
  if (count_gpus(usable) < count) return 0;
  std::array<int, kGpusMax> free;
  int size = 0;
  for (uint16_t left = usable; left != 0; left &= static_cast<uint16_t>(left - 1)) {
    free[size++] = node.gpus[std::countr_zero(left)].free_milli;
  }
  std::nth_element(free.begin(), free.begin() + (count - 1), free.begin() + size);
  const int limit = free[count - 1];
  uint16_t fixed = 0;
  uint16_t equal = 0;
  for (uint16_t left = usable; left != 0; left &= static_cast<uint16_t>(left - 1)) {
    const int g = std::countr_zero(left);
    if (node.gpus[g].free_milli < limit) fixed |= static_cast<uint16_t>(1 << g);
    if (node.gpus[g].free_milli == limit) equal |= static_cast<uint16_t>(1 << g);
  }
  return static_cast<uint16_t>(fixed | choose_closest(node, fixed, equal, count - count_gpus(fixed)));
}

int free_milli_of(const Node& node, uint16_t gpus) {
  int sum = 0;
  for (; gpus != 0; gpus &= static_cast<uint16_t>(gpus - 1))
    sum += node.gpus[std::countr_zero(gpus)].free_milli;
  return sum;
}

}  // namespace

uint16_t usable_gpus(const Node& node, const RequestClass& request, uint32_t tenant) {
  uint16_t usable = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (fits_on_gpu(node, g, request, tenant)) usable |= static_cast<uint16_t>(1 << g);
  }
  return usable;
}

uint16_t choose_tightest_gpus(const Node& node, const RequestClass& request, uint32_t tenant) {
  if (request.gpus == 0) return 0;
  const uint16_t usable = usable_gpus(node, request, tenant);
  if (!request.one_island) return choose_tightest(node, usable, request.gpus);
  uint16_t best = 0;
  std::pair<int, int> least;
  for (uint16_t island : node.islands) {
    const auto members = static_cast<uint16_t>(usable & island);
    const uint16_t found = choose_tightest(node, members, request.gpus);
    if (found == 0) continue;
    const std::pair key(free_milli_of(node, found), count_gpus(members));
    if (best == 0 || key < least) {
      best = found;
      least = key;
    }
  }
  return best;
}

uint16_t choose_closest_of_equal(const Node& node, uint16_t equal_gpus) {
  return choose_closest(node, 0, equal_gpus, 1);
}

int request_capacity(const Node& node, const RequestClass& request, uint32_t tenant) {
  int capacity = kRequestCapacityMax;
  if (request.cpu_milli > 0) capacity = std::min(capacity, node.free_cpu_milli / request.cpu_milli);
  if (request.memory_mib > 0) capacity = std::min(capacity, node.free_memory_mib / request.memory_mib);
  if (request.gpus == 0) return capacity;
  std::array<int, kGpusMax> times{};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_on_gpu(node, g, request, tenant)) continue;
    times[g] = node.gpus[g].free_milli / request.gpu_milli;
    if (request.gpu_memory_mib > 0) {
      times[g] = std::min(times[g], node.gpus[g].usable_memory_mib() / request.gpu_memory_mib);
    }
  }
  if (!request.one_island)
    return std::min(capacity, std::accumulate(times.begin(), times.end(), 0) / request.gpus);
  int sum = 0;
  for (uint16_t island : node.islands) {
    int in_island = 0;
    for (int g = 0; g < node.gpu_count; ++g) in_island += (island >> g & 1) * times[g];
    sum += in_island / request.gpus;
  }
  return std::min(capacity, sum);
}

}  // namespace genie
