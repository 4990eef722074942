// The client's memory: numbered storages, the views of them that ops use, and the quota.
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
#include "tensor_meta.h"

namespace genie {

constexpr int CACHED_VIEWS_MAX = 3;

// One storage, with a cache of its views: creating a view costs more than most lookups.
struct StorageSlot {
  c10::Storage storage;
  uint64_t bytes = 0;
  uint64_t bytes_before_resize = 0;  // the largest size before a Resize
  at::Tensor views[CACHED_VIEWS_MAX];
  uint8_t cached_view_count = 0;
  uint8_t next_cached_view = 0;
  uint32_t graph_use_count = 0;  // graphs that read or create it; kept when it is freed
  FailurePtr failure;            // set if it is poisoned

  bool is_in_use() const { return storage || failure; }
  void clear_views();
};

// Read by other threads while the session is served.
struct MemoryCounters {
  std::atomic<uint64_t> storages{0};
  std::atomic<uint64_t> counted_bytes{0};
  std::atomic<uint64_t> counted_bytes_peak{0};
  // Written by several threads: a parcel is dropped when another executor has acknowledged it.
  std::atomic<uint64_t> parcel_bytes{0};
};

class StorageTable {
 public:
  // `quota_bytes` of 0 means no quota.
  StorageTable(c10::Device device, uint64_t quota_bytes);

  c10::Device device() const { return device_; }
  uint64_t bytes_max() const { return bytes_max_; }
  const MemoryCounters& counters() const { return counters_; }

  // ProtocolError if the storage does not exist.
  StorageSlot& existing_slot(uint32_t number);
  // The slot, in use or not. ProtocolError if the number is too large.
  StorageSlot& slot_at(uint32_t number);
  // ProtocolError if the number is in use or too large.
  void check_number_unused(uint32_t number);

  // The view of a storage. PoisonedTensor if the storage is poisoned; OpRefused if the view exceeds a storage
  // that was shrunk; ProtocolError if it exceeds every size that the storage has had. Valid until the next
  // call for the same slot.
  const at::Tensor& get_view(StorageSlot& slot, const TensorMeta& meta, int64_t offset);

  // Adds the storage of a tensor, which is not shared. ProtocolError if the number is in use, as in the next
  // three functions.
  void add_storage(uint32_t number, at::Tensor tensor);
  void add_poisoned_storage(uint32_t number, FailurePtr failure);
  void allocate(uint32_t number, uint64_t bytes);
  // The number refers to the memory of `source`, until unshare_memory().
  void share_memory(uint32_t number, const StorageSlot& source);
  // Copies the contents to separate memory.
  void unshare_memory(StorageSlot& slot);
  // Replaces the storage, and keeps contents up to the smaller size. Other users of the old storage keep it.
  void resize(StorageSlot& slot, uint64_t bytes);
  void free(uint32_t number);
  // Frees the memory of an existing storage and poisons it.
  void free_and_poison(StorageSlot& slot, FailurePtr failure);
  void clear();

  // QuotaExceeded unless `more_bytes` fit into the quota. Called before memory is allocated.
  void check_quota(uint64_t more_bytes) const;
  // Updates the counters after an op has resized a storage.
  void update_size_after_op(StorageSlot& slot);
  // Restores the size of a storage after an op that resized it has failed.
  void restore_size_after_failed_op(StorageSlot& slot) noexcept;

  // Counts memory as used by the client; negative: releases it.
  void add_counted_bytes(int64_t more_bytes);
  void reset_peak();
  // Adds memory of parcels. Thread-safe.
  void add_parcel_bytes(int64_t more_bytes);
  // Adds memory of unreceived replies; a small amount does not count towards the quota.
  void add_reply_bytes(int64_t more_bytes);
  // Of storages, results without a number, and parcels.
  uint64_t bytes_in_use() const;

  at::Tensor allocate_byte_tensor(uint64_t bytes) const;
  // Whether it is an ordinary tensor of this device, without lazy bits.
  bool is_ordinary_tensor(const at::Tensor& tensor) const {
    return tensor.key_set() == device_dispatch_keys_;
  }

  // Incremented when a slot that graphs use loses or changes its memory.
  uint64_t graph_storage_change_count() const { return graph_storage_change_count_; }

 private:
  // A new storage with the contents up to the smaller size.
  c10::Storage copy_storage(const StorageSlot& slot, uint64_t bytes) const;
  at::Tensor make_view(const StorageSlot& slot, const TensorMeta& meta, int64_t offset) const;
  void count_graph_storage_change(const StorageSlot& slot) {
    graph_storage_change_count_ += slot.graph_use_count > 0;
  }

  c10::Device device_;
  uint64_t bytes_max_;
  c10::DispatchKeySet device_dispatch_keys_, cpu_dispatch_keys_;
  std::vector<std::unique_ptr<StorageSlot[]>> pages_;
  MemoryCounters counters_;
  uint64_t reply_bytes_ = 0;
  uint64_t graph_storage_change_count_ = 0;
};

}  // namespace genie
