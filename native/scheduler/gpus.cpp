#include "gpus.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <tuple>

namespace genie {
namespace {

uint16_t lowest(uint16_t gpus, int count) {
  uint16_t chosen = 0;
  for (; count > 0; --count) {
    const auto bit = static_cast<uint16_t>(gpus & -gpus);
    chosen |= bit;
    gpus ^= bit;
  }
  return chosen;
}

// Islands that are used anyway first, then the smallest that is enough, then the largest.
uint16_t in_few_islands(const Node& node, uint16_t sure, uint16_t equal, int count) {
  uint16_t chosen = 0;
  uint16_t left = equal;
  while (count > 0) {
    uint16_t next = 0;
    std::tuple<int, int, int> least{3, 0, 0};
    for (uint16_t island : node.islands) {
      const auto members = static_cast<uint16_t>(island & left);
      if (members == 0) continue;
      const int size = count_of(members);
      const int first = std::countr_zero(members);
      std::tuple<int, int, int> key{2, -size, first};
      if (size >= count) key = {1, size, first};
      if ((island & sure) != 0) key = {0, 0, first};
      if (key < least) {
        least = key;
        next = members;
      }
    }
    const int taken = std::min(count, count_of(next));
    chosen |= lowest(next, taken);
    left &= static_cast<uint16_t>(~next);
    count -= taken;
  }
  return chosen;
}

// The smallest of the groups that has enough of the equal ones, and all that are sure; 0 when there is none.
uint16_t smallest_enough(const GpuGroups& groups, uint16_t sure, uint16_t equal, int count) {
  uint16_t found = 0;
  const auto key = [](uint16_t gpus) { return std::pair(count_of(gpus), std::countr_zero(gpus)); };
  for (uint16_t group : groups) {
    const auto members = static_cast<uint16_t>(group & equal);
    if (members == 0 || count_of(members) < count || (sure & ~group) != 0) continue;
    if (found == 0 || key(members) < key(found)) found = members;
  }
  return found;
}

// So many of the equal ones, near to each other and to those that are sure.
uint16_t nearest(const Node& node, uint16_t sure, uint16_t equal, int count) {
  if (node.corners.count <= 1) return lowest(equal, count);
  for (const GpuGroups* groups : {&node.corners, &node.islands, &node.numas}) {
    const uint16_t found = smallest_enough(*groups, sure, equal, count);
    if (found != 0) return in_few_islands(node, sure, found, count);
  }
  return in_few_islands(node, sure, equal, count);
}

uint16_t tightest_of(const Node& node, uint16_t usable, int count) {
  if (count_of(usable) < count) return 0;
  std::array<int, kGpusMax> free;
  int size = 0;
  for (uint16_t left = usable; left != 0; left &= static_cast<uint16_t>(left - 1)) {
    free[size++] = node.gpus[std::countr_zero(left)].free_milli;
  }
  std::nth_element(free.begin(), free.begin() + (count - 1), free.begin() + size);
  const int limit = free[count - 1];
  uint16_t sure = 0;
  uint16_t equal = 0;
  for (uint16_t left = usable; left != 0; left &= static_cast<uint16_t>(left - 1)) {
    const int g = std::countr_zero(left);
    if (node.gpus[g].free_milli < limit) sure |= static_cast<uint16_t>(1 << g);
    if (node.gpus[g].free_milli == limit) equal |= static_cast<uint16_t>(1 << g);
  }
  return static_cast<uint16_t>(sure | nearest(node, sure, equal, count - count_of(sure)));
}

int free_milli_of(const Node& node, uint16_t gpus) {
  int sum = 0;
  for (; gpus != 0; gpus &= static_cast<uint16_t>(gpus - 1))
    sum += node.gpus[std::countr_zero(gpus)].free_milli;
  return sum;
}

}  // namespace

uint16_t usable_gpus(const Node& node, const RequestClass& wanted, uint32_t tenant) {
  uint16_t usable = 0;
  for (int g = 0; g < node.gpu_count; ++g) {
    if (fits_gpu(node, g, wanted, tenant)) usable |= static_cast<uint16_t>(1 << g);
  }
  return usable;
}

uint16_t tightest_gpus(const Node& node, const RequestClass& wanted, uint32_t tenant) {
  if (wanted.gpus == 0) return 0;
  const uint16_t usable = usable_gpus(node, wanted, tenant);
  if (!wanted.one_island) return tightest_of(node, usable, wanted.gpus);
  uint16_t best = 0;
  std::pair<int, int> least;
  for (uint16_t island : node.islands) {
    const auto members = static_cast<uint16_t>(usable & island);
    const uint16_t found = tightest_of(node, members, wanted.gpus);
    if (found == 0) continue;
    const std::pair key(free_milli_of(node, found), count_of(members));
    if (best == 0 || key < least) {
      best = found;
      least = key;
    }
  }
  return best;
}

uint16_t nearest_like(const Node& node, uint16_t alike) { return nearest(node, 0, alike, 1); }

int room_on(const Node& node, const RequestClass& wanted, uint32_t tenant) {
  int room = kRoomMax;
  if (wanted.cpu_milli > 0) room = std::min(room, node.free_cpu_milli / wanted.cpu_milli);
  if (wanted.memory_mib > 0) room = std::min(room, node.free_memory_mib / wanted.memory_mib);
  if (wanted.gpus == 0) return room;
  std::array<int, kGpusMax> times{};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!fits_gpu(node, g, wanted, tenant)) continue;
    times[g] = node.gpus[g].free_milli / wanted.gpu_milli;
    if (wanted.gpu_memory_mib > 0) {
      times[g] = std::min(times[g], node.gpus[g].usable_memory_mib() / wanted.gpu_memory_mib);
    }
  }
  if (!wanted.one_island) return std::min(room, std::accumulate(times.begin(), times.end(), 0) / wanted.gpus);
  int sum = 0;
  for (uint16_t island : node.islands) {
    int in_island = 0;
    for (int g = 0; g < node.gpu_count; ++g) in_island += (island >> g & 1) * times[g];
    sum += in_island / wanted.gpus;
  }
  return std::min(room, sum);
}

}  // namespace genie
