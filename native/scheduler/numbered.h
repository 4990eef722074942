// Things by number. Of the numbers that were given back the lowest is given out first.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "request.h"

namespace genie {

template <class Thing>
class Numbered {
 public:
  Numbered(std::string what, size_t count_max) : what_(std::move(what)), count_max_(count_max) {}

  int add(Thing thing) {
    if (!free_.empty()) {
      const int number = *free_.begin();
      free_.erase(free_.begin());
      things_[number] = std::move(thing);
      return number;
    }
    if (things_.size() >= count_max_) {
      throw Misuse("there are " + std::to_string(count_max_) + " of " + what_ + " already; drop one first");
    }
    things_.push_back(std::move(thing));
    return static_cast<int>(things_.size()) - 1;
  }

  const Thing& get(int number) const {
    if (number < 0 || number >= static_cast<int>(things_.size()) || !things_[number]) {
      throw Misuse("there is no such " + what_);
    }
    return *things_[number];
  }

  template <class Change>
  void change(const Change& change) {
    for (std::optional<Thing>& thing : things_) {
      if (thing) change(*thing);
    }
  }

  void drop(int number) {
    get(number);
    things_[number].reset();
    free_.insert(number);
  }

 private:
  std::string what_;
  size_t count_max_;
  std::vector<std::optional<Thing>> things_;
  std::set<int> free_;
};

}  // namespace genie
