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
  SlotTable(std::string item_name, size_t count_max)
      : item_name_(std::move(item_name)), item_count_max_(count_max) {}

  int add(Item item) {
    if (!free_numbers_.empty()) {
      const int number = *free_numbers_.begin();
      free_numbers_.erase(free_numbers_.begin());
      items_[number] = std::move(item);
      return number;
    }
    if (items_.size() >= item_count_max_) {
      throw UsageError(item_name_ + " limit of " + std::to_string(item_count_max_) +
                       " reached; drop one first");
    }
    items_.push_back(std::move(item));
    return static_cast<int>(items_.size()) - 1;
  }

  const Item& get(int number) const {
    if (number < 0 || number >= static_cast<int>(items_.size()) || !items_[number]) {
      throw UsageError("unknown " + item_name_ + ": " + std::to_string(number));
    }
    return *items_[number];
  }

  template <class Visit>
  void for_each(const Visit& visit) {
    for (std::optional<Item>& item : items_) {
      if (item) visit(*item);
    }
  }

  void drop(int number) {
    get(number);
    items_[number].reset();
    free_numbers_.insert(number);
  }

 private:
  std::string item_name_;
  size_t item_count_max_;
  std::vector<std::optional<Item>> items_;
  std::set<int> free_numbers_;
};

}  // namespace genie
