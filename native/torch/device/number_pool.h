// Numbers that the client assigns to objects of an executor: storages, generators, graphs.
#pragma once

#include <cstdint>
#include <vector>

namespace genie {

// Freed numbers are assigned again. The mutex of the connection guards it.
class NumberPool {
 public:
  // Numbers from `first` to `end` - 1.
  NumberPool(uint32_t first, uint32_t end) : first_(first), end_(end), next_(first) {}

  uint64_t unassigned_count() const { return freed_.size() + (end_ - next_); }
  uint64_t assigned_count() const { return next_ - first_ - freed_.size(); }
  // Only if `unassigned_count()` is not 0.
  uint32_t assign() {
    if (freed_.empty()) return next_++;
    uint32_t number = freed_.back();
    freed_.pop_back();
    return number;
  }
  void free(uint32_t number) { freed_.push_back(number); }
  void free(const std::vector<uint32_t>& numbers) {
    freed_.insert(freed_.end(), numbers.begin(), numbers.end());
  }

 private:
  uint32_t first_, end_, next_;
  std::vector<uint32_t> freed_;
};

}  // namespace genie
