// The client's memory: numbered storages, the views of them that ops use, and the quota.
// Not for: what ops do with them (ops.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

#include "failure.h"
#include "look.h"

namespace genie {

constexpr int VIEWS_KEPT_MAX = 3;

// One storage. Its views are made once and kept, because making one costs more than most lookups.
struct Slot {
  c10::Storage storage;
  uint64_t bytes = 0;
  uint64_t bytes_once = 0;  // the most it had before the client gave it another size
  at::Tensor views[VIEWS_KEPT_MAX];
  uint8_t views_kept = 0;
  uint8_t next_view = 0;
  uint32_t watchers = 0;  // graphs that use or make it; they stay when it is freed
  FailurePtr failure;     // why it was never made

  bool taken() const { return storage || failure; }
  void forget_views();
};

// Read by other threads while a session is served.
struct MemoryCounters {
  std::atomic<uint64_t> storages{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> bytes_peak{0};
  // On the shelf. Several threads write it: copies leave when another executor has them.
  std::atomic<uint64_t> shelved_bytes{0};
};

class StorageTable {
 public:
  // `bytes_max` of 0 means no quota.
  StorageTable(c10::Device device, uint64_t bytes_max);

  c10::Device device() const { return device_; }
  uint64_t bytes_max() const { return bytes_max_; }
  const MemoryCounters& counters() const { return counters_; }

  // ProtocolError when it does not exist.
  Slot& known(uint32_t number);
  // ProtocolError when the number is taken or too large.
  void check_free(uint32_t number);

  // The tensor that looks like this. Poisoned when it was never made; Refused when it reaches beyond what the
  // client has left of the storage; ProtocolError when it reaches beyond all that the storage ever was. Valid
  // until the next call for the same slot.
  const at::Tensor& view(Slot& slot, const Look& look, int64_t offset);

  // Takes over a tensor that nobody else has.
  void keep(uint32_t number, at::Tensor tensor);
  void poison(uint32_t number, FailurePtr failure);
  void allocate(uint32_t number, uint64_t bytes);
  // The number stands for the same memory as a slot, until unshare().
  void share(uint32_t number, const Slot& with);
  // Puts the contents into memory of its own.
  void unshare(Slot& slot);
  // Puts the contents, as far as they fit, into another storage. The old one, where someone still reads it,
  // stays as it was.
  void resize(Slot& slot, uint64_t bytes);
  void free(uint32_t number);
  // Lets its memory go; whoever uses it learns of the failure.
  void spoil(Slot& slot, FailurePtr failure);
  void clear();

  // OverQuota unless there is room for so much more. Called before memory is taken.
  void check_room(uint64_t more_bytes) const;
  // After an op has changed the size of a storage.
  void recount(Slot& slot);
  // An op has failed after it had changed a tensor: its memory is what it was, as far as the client can see.
  void restore(Slot& slot) noexcept;

  // Memory taken, or given back when negative, by results that have no number yet.
  void count(int64_t more_bytes);
  // From now on the peak is counted anew.
  void forget_peak();
  // Likewise, by copies on the shelf; from any thread.
  void count_shelved(int64_t more_bytes);
  // Likewise, by replies that are kept; it counts only when it is much.
  void count_aside(int64_t more_bytes);
  // Numbered, without a number yet, and on the shelf.
  uint64_t bytes_in_use() const;

  at::Tensor empty_bytes(uint64_t bytes) const;
  // Whether it is an ordinary tensor of this device, without lazy bits.
  bool is_plain(const at::Tensor& tensor) const { return tensor.key_set() == keys_; }

  // Grows whenever a slot with watchers is given other memory, or none.
  uint64_t watched_changes() const { return watched_changes_; }

  // Taken or not.
  Slot& at(uint32_t number);

 private:
  // Another storage, with the contents as far as they fit.
  c10::Storage copied(const Slot& slot, uint64_t bytes) const;
  at::Tensor make_view(const Slot& slot, const Look& look, int64_t offset) const;
  void changed(const Slot& slot) { watched_changes_ += slot.watchers > 0; }

  c10::Device device_;
  uint64_t bytes_max_;
  c10::DispatchKeySet keys_, cpu_keys_;
  std::vector<std::unique_ptr<Slot[]>> pages_;
  MemoryCounters counters_;
  uint64_t aside_bytes_ = 0;
  uint64_t watched_changes_ = 0;
};

}  // namespace genie
