// What a node's free parts are good for, by the requests of late: a table of everything that was asked so
// far.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fill.h"

namespace genie {

constexpr int kSeveralMax = kGpusMax - 1;  // requests have 2 to 16 GPUs

struct Value {
  int64_t fill = 0;                         // see Fill
  std::array<int64_t, kSeveralMax> room{};  // for each of Values::several()
};

class Values {
 public:
  // From the last requests, the oldest first.
  Values(const Cluster& cluster, const std::vector<RequestClass>& history, int draws);

  const Value& of(const FreeState& state);
  // Numbers of GPUs above 1 that one request may ask for: powers of two, then others that the history has.
  const std::vector<int>& several() const { return several_; }

 private:
  struct Asked {
    int gpus;
    int cpu_milli;
    int memory_mib;
    uint64_t models;
  };
  struct Slot {
    FreeState state;
    bool used = false;
    uint32_t value = 0;  // in values_
  };
  static constexpr size_t kSlotsMax = size_t{1} << 19;

  int64_t room_for(int gpus, const FreeState& state) const;
  void make_space();

  Fill fill_;
  std::vector<int> several_;
  std::vector<Asked> asked_;  // for several GPUs
  std::vector<Slot> slots_ = std::vector<Slot>(size_t{1} << 14);
  std::vector<Value> values_;
};

}  // namespace genie
