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
struct OutputSpec {
  OutputKind kind = OutputKind::None;
  bool is_view = false;  // of input `source_input_index`; local to the client
  bool is_contiguous = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  int64_t storage_bytes = 0;
  int source_input_index = -1;
  c10::IValue constant;  // a number; for a list, an empty list of its type; None if the op returns None
  std::vector<OutputSpec> items;
};

// How calls with one key are executed.
enum class OpExecutionMode : uint8_t {
  ClientOnly,      // returns only views of its inputs; not sent
  Streamed,        // outputs are predicted; sent without a reply
  AwaitReply,      // outputs depend on values: the executor's reply describes them
  LearnFromReply,  // outputs cannot be predicted, but the executor's first reply holds for all calls
};

struct CachedTemplate final : c10::intrusive_ptr_target {
  std::vector<int64_t> key;
  uint64_t hash = 0;
  uint32_t number = 0;
  OpExecutionMode mode = OpExecutionMode::AwaitReply;
  bool was_used_since_eviction = true;
  uint32_t new_storage_count = 0;
  uint32_t argument_and_output_count =
      0;  // arguments and outputs, including those in lists; at least what the executor counts
  std::vector<OutputSpec> outputs;
};
using CachedTemplatePtr = c10::intrusive_ptr<CachedTemplate>;

inline uint64_t hash_template_key(const std::vector<int64_t>& key) {
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
  explicit TemplateCache(uint32_t template_count_max)
      : template_count_max_(template_count_max), hash_slots_(1024) {}

  CachedTemplatePtr find(uint64_t hash, const std::vector<int64_t>& key) {
    for (size_t at = hash & slot_mask();; at = (at + 1) & slot_mask()) {
      const CachedTemplatePtr& found = hash_slots_[at];
      if (!found) return {};
      if (found->hash == hash && found->key == key) {
        found->was_used_since_eviction = true;
        return found;
      }
    }
  }

  // Assigns a number to the template, and writes DropTemplate for those that are evicted.
  void insert(const CachedTemplatePtr& added, WireWriter& records) {
    while (template_count_ > 0 &&
           (template_count_ >= template_count_max_ ||
            argument_and_output_count_ + added->argument_and_output_count > CACHED_ARGUMENTS_AND_OUTPUTS_MAX))
      evict_quarter_of_templates(records);
    if ((template_count_ + 1) * 2 > hash_slots_.size()) resize_hash_slots(hash_slots_.size() * 2);
    added->number = assign_template_number();
    put_into_hash_slot(added);
    template_count_++;
    argument_and_output_count_ += added->argument_and_output_count;
  }

  // Assigns a new number to the template; the executor drops the old one.
  void assign_new_template_number(CachedTemplate& cached_template, WireWriter& records) {
    records.begin_record(RecordKind::DropTemplate, cached_template.number);
    uint32_t old = cached_template.number;
    cached_template.number = assign_template_number();
    free_template_numbers_.push_back(old);
  }

  size_t template_count() const { return template_count_; }
  void clear() {
    hash_slots_.assign(1024, {});
    template_count_ = 0;
    argument_and_output_count_ = 0;
  }

 private:
  uint32_t assign_template_number() {
    if (free_template_numbers_.empty()) return next_template_number_++;
    uint32_t number = free_template_numbers_.back();
    free_template_numbers_.pop_back();
    return number;
  }

  size_t slot_mask() const { return hash_slots_.size() - 1; }

  void put_into_hash_slot(const CachedTemplatePtr& added) {
    size_t at = added->hash & slot_mask();
    while (hash_slots_[at]) at = (at + 1) & slot_mask();
    hash_slots_[at] = added;
  }

  void resize_hash_slots(size_t size) {
    auto old = std::move(hash_slots_);
    hash_slots_.assign(size, {});
    for (auto& each : old)
      if (each) put_into_hash_slot(each);
  }

  // Evicts a quarter at once, so that a program with ever new shapes does not pay for this at every op.
  void evict_quarter_of_templates(WireWriter& records) {
    auto old = std::move(hash_slots_);
    hash_slots_.assign(old.size(), {});
    size_t wanted = template_count_ / 4 + 1, dropped = 0;
    for (int round = 0; round < 2 && dropped < wanted; round++) {
      for (auto& each : old) {
        if (!each || dropped >= wanted) continue;
        if (each->was_used_since_eviction) {
          each->was_used_since_eviction = false;
          continue;
        }
        if (each->mode != OpExecutionMode::ClientOnly)
          records.begin_record(RecordKind::DropTemplate, each->number);
        free_template_numbers_.push_back(each->number);
        argument_and_output_count_ -= each->argument_and_output_count;
        each.reset();
        dropped++;
        template_count_--;
      }
    }
    for (auto& each : old)
      if (each) put_into_hash_slot(each);
  }

  // Leaves space for templates that are being replaced, which the executor briefly holds twice.
  static constexpr uint64_t CACHED_ARGUMENTS_AND_OUTPUTS_MAX = TEMPLATE_ENTRIES_MAX / 2;

  uint32_t template_count_max_;
  size_t template_count_ = 0;
  uint64_t argument_and_output_count_ = 0;
  uint32_t next_template_number_ = 0;
  std::vector<uint32_t> free_template_numbers_;
  std::vector<CachedTemplatePtr> hash_slots_;
};

}  // namespace genie
