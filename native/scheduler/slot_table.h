// Items by number. The lowest free number is reused first.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "request.h"

namespace genie {

template <class Item>
class SlotTable {
 public:
  SlotTable(std::string what, size_t count_max) : what_(std::move(what)), count_max_(count_max) {}

  int add(Item item) {
    if (!free_.empty()) {
      const int number = *free_.begin();
      free_.erase(free_.begin());
      items_[number] = std::move(item);
      return number;
    }
    if (items_.size() >= count_max_) {
      throw UsageError(what_ + " limit of " + std::to_string(count_max_) + " reached; drop one first");
    }
    items_.push_back(std::move(item));
    return static_cast<int>(items_.size()) - 1;
  }

  const Item& get(int number) const {
    if (number < 0 || number >= static_cast<int>(items_.size()) || !items_[number]) {
      throw UsageError("unknown " + what_ + ": " + std::to_string(number));
    }
    return *items_[number];
  }

  template <class Change>
  void change(const Change& change) {
    for (std::optional<Item>& item : items_) {
      if (item) change(*item);
    }
  }

  void drop(int number) {
    get(number);
    items_[number].reset();
    free_.insert(number);
  }

 private:
  std::string what_;
  size_t count_max_;
  std::vector<std::optional<Item>> items_;
  std::set<int> free_;
};

}  // namespace genie
