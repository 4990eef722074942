// Limits the work of one call, so that a caller can do long work in slices.
#pragma once

#include <cstdint>
#include <limits>

namespace genie {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The unit is the evaluation of a request on a node. Work that takes longer is charged with more.
class WorkBudget {
 public:
  explicit WorkBudget(int64_t units) : left_(units) {}

  bool is_exhausted() const { return left_ <= 0; }
  // A call may exceed the budget by its last piece of work.
  void charge(int64_t units) { left_ -= units; }

 private:
  int64_t left_;
};

}  // namespace genie
