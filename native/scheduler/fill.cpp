#include "fill.h"

#include <algorithm>

#include "dice.h"

namespace genie {
namespace {

// How far ahead to look: so many arrivals, and so many more for each free GPU. A node is one of many. One
// that looks much further believes that the rare request which fits its leftovers will come to it.
constexpr int kArrivals = 10;
constexpr int kArrivalsPerGpu = 5;

// Sequence after sequence from one shuffled deck, so that each request of the history comes as often as any.
std::vector<RequestClass> draw(std::vector<RequestClass> deck, size_t count) {
  Dice dice(0);
  std::vector<RequestClass> drawn;
  drawn.reserve(count);
  while (!deck.empty() && drawn.size() < count) {
    for (size_t left = deck.size(); left > 1; --left) std::swap(deck[left - 1], deck[dice.roll() % left]);
    const size_t part = std::min(deck.size(), count - drawn.size());
    drawn.insert(drawn.end(), deck.begin(), deck.begin() + static_cast<std::ptrdiff_t>(part));
  }
  return drawn;
}

// A GPU with less memory than share free counts as the lesser.
int16_t usable_milli(const Gpu& gpu, int memory_mib) {
  if (memory_mib == 0) return static_cast<int16_t>(gpu.free_milli);
  const int64_t by_memory = int64_t{gpu.usable_memory_mib()} * kFullMilli / memory_mib;
  return static_cast<int16_t>(std::min<int64_t>(gpu.free_milli, by_memory));
}

void add_gpu(FreeState& state, int16_t milli) {
  if (milli <= 0) return;
  int at = state.gpu_count++;
  for (; at > 0 && state.gpu_milli[at - 1] < milli; --at) state.gpu_milli[at] = state.gpu_milli[at - 1];
  state.gpu_milli[at] = milli;
}

}  // namespace

FreeState free_state(const Node& node) {
  FreeState state{node.free_cpu_milli,
                  node.free_memory_mib,
                  node.gpu_memory_mib,
                  static_cast<int16_t>(node.model),
                  0,
                  {}};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (node.gpu_open(g)) add_gpu(state, usable_milli(node.gpus[g], node.gpu_memory_mib));
  }
  return state;
}

FreeState free_state_after(const Node& node, const RequestClass& wanted, uint16_t gpus) {
  FreeState state{node.free_cpu_milli - wanted.cpu_milli,
                  node.free_memory_mib - wanted.memory_mib,
                  node.gpu_memory_mib,
                  static_cast<int16_t>(node.model),
                  0,
                  {}};
  for (int g = 0; g < node.gpu_count; ++g) {
    if (!node.gpu_open(g)) continue;
    Gpu gpu = node.gpus[g];
    if ((gpus >> g & 1) != 0) {
      gpu.free_milli -= wanted.gpu_milli;
      gpu.free_memory_mib -= wanted.gpu_memory_mib;
    }
    add_gpu(state, usable_milli(gpu, node.gpu_memory_mib));
  }
  return state;
}

// The free parts of one node in every sequence.
struct Fill::Hands {
  alignas(64) std::array<std::array<int16_t, kLanes>, kGpusMax> free;
  alignas(64) std::array<int32_t, kLanes> cpu_milli;
  alignas(64) std::array<int32_t, kLanes> memory_mib;
};

Fill::Fill(const Cluster& cluster, const std::vector<RequestClass>& history, int draws) {
  std::vector<RequestClass> deck;
  for (const RequestClass& wanted : history) {
    if (wanted.gpus > 0) deck.push_back(wanted);
  }
  const std::vector<RequestClass> drawn = draw(std::move(deck), static_cast<size_t>(draws) * kLanes);
  std::vector<Kind> kinds;
  for (const Node& node : cluster.nodes()) {
    if (node.there) kinds.push_back({node.model, node.gpu_memory_mib});
  }
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  for (const Kind& kind : kinds) scripts_.push_back(script_for(kind, drawn, draws));
}

Fill::Script Fill::script_for(const Kind& kind, const std::vector<RequestClass>& drawn, int draws) {
  Script script;
  script.kind = kind;
  if (drawn.empty()) return script;
  script.steps.resize(draws);
  for (int t = 0; t < draws; ++t) {
    Step& step = script.steps[t];
    step.several = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      const RequestClass& wanted = drawn[lane * draws + t];
      const bool allowed =
          (wanted.models >> kind.model & 1) != 0 && wanted.gpu_memory_mib <= kind.gpu_memory_mib;
      int64_t need = wanted.gpu_milli;
      if (kind.gpu_memory_mib > 0 && wanted.is_fraction()) {
        const int64_t mib = kind.gpu_memory_mib;
        need = std::max(need, (int64_t{wanted.gpu_memory_mib} * kFullMilli + mib - 1) / mib);
      }
      step.need[lane] = allowed ? static_cast<int16_t>(need) : kNever;
      step.count[lane] = static_cast<int16_t>(wanted.gpus);
      step.cpu_milli[lane] = wanted.cpu_milli;
      step.memory_mib[lane] = wanted.memory_mib;
      if (!allowed) continue;
      step.several = step.several || wanted.gpus > 1;
      script.need_min = std::min(script.need_min, step.need[lane]);
      script.cpu_min = std::min(script.cpu_min, wanted.cpu_milli);
      script.memory_min = std::min(script.memory_min, wanted.memory_mib);
    }
  }
  return script;
}

int64_t Fill::of(const FreeState& state) const {
  const Kind kind{state.model, state.gpu_memory_mib};
  const auto before_it = [](const Script& script, const Kind& other) { return script.kind < other; };
  const auto found = std::lower_bound(scripts_.begin(), scripts_.end(), kind, before_it);
  if (found == scripts_.end() || found->kind != kind) return 0;  // came after the last lesson
  const Script& script = *found;
  if (state.cpu_milli < script.cpu_min || state.memory_mib < script.memory_min) return 0;
  int gpus = 0;
  int64_t before = 0;
  Hands hands;
  for (; gpus < state.gpu_count && state.gpu_milli[gpus] >= script.need_min; ++gpus) {
    hands.free[gpus].fill(state.gpu_milli[gpus]);
    before += state.gpu_milli[gpus];
  }
  if (gpus == 0) return 0;
  hands.cpu_milli.fill(state.cpu_milli);
  hands.memory_mib.fill(state.memory_mib);
  const auto steps = static_cast<size_t>(kArrivals + kArrivalsPerGpu * before / kFullMilli);
  play(script, std::min(steps, script.steps.size()), gpus, hands);
  int64_t after = 0;
  for (int g = 0; g < gpus; ++g) {
    for (int lane = 0; lane < kLanes; ++lane) after += hands.free[g][lane];
  }
  return before * kLanes - after;
}

// Wider vectors make this three times as fast, and every processor of the last ten years has them.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FOR_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_WIDE_VECTORS
#endif

// Each step is the same for all lanes: no branch depends on a lane, so the compiler can take them at once.
FOR_WIDE_VECTORS void Fill::play(const Script& script, size_t steps, int gpus, Hands& hands) {
  alignas(64) std::array<int16_t, kLanes> ok, best, left;
  for (size_t t = 0; t < steps; ++t) {
    const Step& step = script.steps[t];
    for (int i = 0; i < kLanes; ++i) {
      ok[i] = hands.cpu_milli[i] >= step.cpu_milli[i] && hands.memory_mib[i] >= step.memory_mib[i] ? -1 : 0;
    }
    best.fill(kNever);
    for (int g = 0; g < gpus; ++g) {
      for (int i = 0; i < kLanes; ++i) {
        const int16_t free = hands.free[g][i];
        best[i] = free >= step.need[i] && free < best[i] ? free : best[i];
      }
    }
    if (step.several) {
      left.fill(0);
      for (int g = 0; g < gpus; ++g) {
        for (int i = 0; i < kLanes; ++i) left[i] += hands.free[g][i] >= step.need[i] ? 1 : 0;
      }
      for (int i = 0; i < kLanes; ++i) ok[i] &= left[i] >= step.count[i] ? -1 : 0;
      // Several GPUs: the first that will do.
      for (int i = 0; i < kLanes; ++i)
        left[i] = static_cast<int16_t>(step.count[i] > 1 ? step.count[i] & ok[i] : 0);
      for (int g = 0; g < gpus; ++g) {
        for (int i = 0; i < kLanes; ++i) {
          const int16_t hit = left[i] > 0 && hands.free[g][i] >= step.need[i] ? -1 : 0;
          hands.free[g][i] = static_cast<int16_t>(hands.free[g][i] - (hit & step.need[i]));
          left[i] = static_cast<int16_t>(left[i] + hit);
        }
      }
    }
    for (int i = 0; i < kLanes; ++i) ok[i] = static_cast<int16_t>(ok[i] & (best[i] < kNever ? -1 : 0));
    for (int i = 0; i < kLanes; ++i) left[i] = static_cast<int16_t>(step.count[i] == 1 ? ok[i] : 0);
    for (int g = 0; g < gpus; ++g) {
      for (int i = 0; i < kLanes; ++i) {
        const int16_t hit = static_cast<int16_t>(left[i] & (hands.free[g][i] == best[i] ? -1 : 0));
        hands.free[g][i] = static_cast<int16_t>(hands.free[g][i] - (hit & step.need[i]));
        left[i] = static_cast<int16_t>(left[i] & ~hit);
      }
    }
    for (int i = 0; i < kLanes; ++i) {
      hands.cpu_milli[i] -= static_cast<int32_t>(ok[i]) & step.cpu_milli[i];
      hands.memory_mib[i] -= static_cast<int32_t>(ok[i]) & step.memory_mib[i];
    }
    if (t % 8 != 7) continue;
    // Nothing that can still come fits anywhere: the rest changes nothing.
    int alive = 0;
    for (int i = 0; i < kLanes; ++i) best[i] = 0;
    for (int g = 0; g < gpus; ++g) {
      for (int i = 0; i < kLanes; ++i) best[i] = std::max(best[i], hands.free[g][i]);
    }
    for (int i = 0; i < kLanes; ++i)
      alive |= best[i] >= script.need_min && hands.cpu_milli[i] >= script.cpu_min;
    if (alive == 0) return;
  }
}

}  // namespace genie
