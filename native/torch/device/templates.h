// Cache of templates: for an op with arguments of given kinds and shapes, its number on the executor and its
// outputs. The key contains everything except values that are sent as data. Does not build keys or templates
// (dispatch.cpp, template_body.cpp).
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include "../wire.h"

namespace genie {

// One output, as the client constructs it.
struct Output {
  OutputKind kind = OutputKind::None;
  bool view = false;  // of input `source`; local to the client
  bool contiguous = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  int64_t storage_bytes = 0;
  int source = -1;
  c10::IValue constant;  // a number; for a list, an empty list of its type; None if the op returns None
  std::vector<Output> items;
};

// How calls with one key are executed.
enum class OpExecutionMode : uint8_t {
  Local,    // returns only views of its inputs; not sent
  Stream,   // outputs are predicted; sent without a reply
  Dynamic,  // outputs depend on values: the executor's reply describes them
  Learn,    // outputs cannot be predicted, but the executor's first reply holds for all calls
};

struct Template final : c10::intrusive_ptr_target {
  std::vector<int64_t> key;
  uint64_t hash = 0;
  uint32_t number = 0;
  OpExecutionMode mode = OpExecutionMode::Dynamic;
  bool used = true;  // since the last eviction
  uint32_t new_outputs = 0;
  uint32_t nodes = 0;  // arguments and outputs, including those in lists; at least what the executor counts
  std::vector<Output> outputs;
};
using TemplatePtr = c10::intrusive_ptr<Template>;

inline uint64_t hash_of(const std::vector<int64_t>& key) {
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (int64_t word : key) {
    hash ^= static_cast<uint64_t>(word);
    hash *= 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  return hash;
}

// Hash table with open addressing, and CLOCK eviction when it is full.
class TemplateCache {
 public:
  explicit TemplateCache(uint32_t capacity) : capacity_(capacity), slots_(1024) {}

  TemplatePtr find(uint64_t hash, const std::vector<int64_t>& key) {
    for (size_t at = hash & mask();; at = (at + 1) & mask()) {
      const TemplatePtr& found = slots_[at];
      if (!found) return {};
      if (found->hash == hash && found->key == key) {
        found->used = true;
        return found;
      }
    }
  }

  // Assigns a number to the template, and writes DropTemplate for those that are evicted.
  void insert(const TemplatePtr& added, Writer& records) {
    while (count_ > 0 && (count_ >= capacity_ || nodes_ + added->nodes > CACHED_NODES_MAX)) evict(records);
    if ((count_ + 1) * 2 > slots_.size()) rebuild(slots_.size() * 2);
    added->number = new_number();
    place(added);
    count_++;
    nodes_ += added->nodes;
  }

  // Assigns a new number to the template; the executor drops the old one.
  void renumber(Template& known, Writer& records) {
    records.record(Record::DropTemplate, known.number);
    uint32_t old = known.number;
    known.number = new_number();
    free_numbers_.push_back(old);
  }

  size_t count() const { return count_; }
  void clear() {
    slots_.assign(1024, {});
    count_ = 0;
    nodes_ = 0;
  }

 private:
  uint32_t new_number() {
    if (free_numbers_.empty()) return next_number_++;
    uint32_t number = free_numbers_.back();
    free_numbers_.pop_back();
    return number;
  }

  size_t mask() const { return slots_.size() - 1; }

  void place(const TemplatePtr& added) {
    size_t at = added->hash & mask();
    while (slots_[at]) at = (at + 1) & mask();
    slots_[at] = added;
  }

  void rebuild(size_t size) {
    auto old = std::move(slots_);
    slots_.assign(size, {});
    for (auto& each : old)
      if (each) place(each);
  }

  // Evicts a quarter at once, so that a program with ever new shapes does not pay for this at every op.
  void evict(Writer& records) {
    auto old = std::move(slots_);
    slots_.assign(old.size(), {});
    size_t wanted = count_ / 4 + 1, dropped = 0;
    for (int round = 0; round < 2 && dropped < wanted; round++) {
      for (auto& each : old) {
        if (!each || dropped >= wanted) continue;
        if (each->used) {
          each->used = false;
          continue;
        }
        if (each->mode != OpExecutionMode::Local) records.record(Record::DropTemplate, each->number);
        free_numbers_.push_back(each->number);
        nodes_ -= each->nodes;
        each.reset();
        dropped++;
        count_--;
      }
    }
    for (auto& each : old)
      if (each) place(each);
  }

  // Leaves space for templates that are being replaced, which the executor briefly holds twice.
  static constexpr uint64_t CACHED_NODES_MAX = TEMPLATE_NODES_MAX / 2;

  uint32_t capacity_;
  size_t count_ = 0;
  uint64_t nodes_ = 0;
  uint32_t next_number_ = 0;
  std::vector<uint32_t> free_numbers_;
  std::vector<TemplatePtr> slots_;
};

}  // namespace genie
