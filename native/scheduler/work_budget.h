// Limits the work of one call, so that a caller can do long work in slices.
#pragma once

#include <cstdint>
#include <limits>

namespace genie {

constexpr int64_t kUnlimitedWorkUnits = std::numeric_limits<int64_t>::max();

// The unit is the evaluation of a request on a node. Work that takes longer is charged with more.
class WorkBudget {
 public:
  explicit WorkBudget(int64_t units) : remaining_units_(units) {}

  bool is_exhausted() const { return remaining_units_ <= 0; }
  // A call may exceed the budget by its last piece of work.
  void charge(int64_t units) { remaining_units_ -= units; }

 private:
  int64_t remaining_units_;
};

}  // namespace genie
