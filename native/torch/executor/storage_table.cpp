#include "storage_table.h"

#include <algorithm>
#include <string>

#include <ATen/ops/empty.h>

namespace genie {

namespace {

constexpr uint32_t SLOTS_PER_PAGE = 1024;
// Unreceived replies up to this size do not count, so that a session at its quota can still read.
constexpr uint64_t UNCOUNTED_REPLY_BYTES_MAX = 64u << 20;

at::Tensor empty_byte_tensor(c10::Device device, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

void StorageSlot::clear_views() {
  for (at::Tensor& view : views) view.reset();
  cached_view_count = next_cached_view = 0;
}

StorageTable::StorageTable(c10::Device device, uint64_t quota_bytes)
    : device_(device),
      bytes_max_(quota_bytes),
      device_dispatch_keys_(empty_byte_tensor(device, 0).key_set()),
      cpu_dispatch_keys_(empty_byte_tensor(c10::kCPU, 0).key_set()),
      pages_(STORAGES_MAX / SLOTS_PER_PAGE) {}

StorageSlot& StorageTable::slot_at(uint32_t number) {
  if (number >= STORAGES_MAX) {
    throw ProtocolError("storage " + std::to_string(number) + " is out of range");
  }
  auto& page = pages_[number / SLOTS_PER_PAGE];
  if (!page) page = std::make_unique<StorageSlot[]>(SLOTS_PER_PAGE);
  return page[number % SLOTS_PER_PAGE];
}

StorageSlot& StorageTable::existing_slot(uint32_t number) {
  StorageSlot& slot = slot_at(number);
  if (slot.is_in_use()) return slot;
  throw ProtocolError("storage " + std::to_string(number) + " does not exist");
}

void StorageTable::check_number_unused(uint32_t number) {
  if (slot_at(number).is_in_use())
    throw ProtocolError("storage " + std::to_string(number) + " is already in use");
}

const at::Tensor& StorageTable::get_view(StorageSlot& slot, const TensorMeta& meta, int64_t offset) {
  if (slot.failure) throw PoisonedTensor(slot.failure);
  if (offset < 0 || offset > OFFSET_MAX)
    throw ProtocolError("the offset of a tensor is outside of its storage");
  uint64_t end = static_cast<uint64_t>(offset) * meta.item_bytes + meta.span_bytes;
  if (meta.span_bytes && end > slot.bytes) {
    if (end > slot.bytes_before_resize) throw ProtocolError("a tensor exceeds its storage");
    throw OpRefused("a tensor exceeds its storage, which was resized to " + std::to_string(slot.bytes) +
                    " bytes and needs " + std::to_string(end) +
                    ": resize the storage before using the tensor");
  }
  for (int i = 0; i < slot.cached_view_count; i++) {
    if (meta.matches(slot.views[i], offset)) return slot.views[i];
  }
  int index = slot.cached_view_count;
  if (slot.cached_view_count < CACHED_VIEWS_MAX) {
    slot.cached_view_count++;
  } else {
    index = slot.next_cached_view;
    slot.next_cached_view = static_cast<uint8_t>((slot.next_cached_view + 1) % CACHED_VIEWS_MAX);
  }
  return slot.views[index] = make_view(slot, meta, offset);
}

at::Tensor StorageTable::make_view(const StorageSlot& slot, const TensorMeta& meta, int64_t offset) const {
  // A scalar that an op returns in CPU memory stays there, as it does without Genie.
  auto keys = slot.storage.device().is_cpu() ? cpu_dispatch_keys_ : device_dispatch_keys_;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(slot.storage), keys,
                                                             c10::scalarTypeToTypeMeta(meta.dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes, meta.strides, offset);
  if (meta.flags & VIEW_CONJUGATE) view._set_conj(true);
  if (meta.flags & VIEW_NEGATIVE) view._set_neg(true);
  return view;
}

void StorageTable::add_storage(uint32_t number, at::Tensor tensor) {
  check_number_unused(number);
  StorageSlot& slot = slot_at(number);
  slot.storage = tensor.storage();
  slot.bytes = slot.storage.nbytes();
  slot.views[0] = std::move(tensor);
  slot.cached_view_count = 1;
  counters_.storages.fetch_add(1, std::memory_order_relaxed);
  add_counted_bytes(static_cast<int64_t>(slot.bytes));
}

void StorageTable::add_poisoned_storage(uint32_t number, FailurePtr failure) {
  check_number_unused(number);
  slot_at(number).failure = std::move(failure);
  counters_.storages.fetch_add(1, std::memory_order_relaxed);
}

void StorageTable::allocate(uint32_t number, uint64_t bytes) {
  check_number_unused(number);
  check_quota(bytes);
  add_storage(number, allocate_byte_tensor(bytes));
}

void StorageTable::share_memory(uint32_t number, const StorageSlot& source) {
  check_number_unused(number);
  check_quota(source.bytes);
  StorageSlot& slot = slot_at(number);
  slot.storage = source.storage;
  slot.bytes = source.bytes;
  slot.bytes_before_resize = source.bytes_before_resize;
  counters_.storages.fetch_add(1, std::memory_order_relaxed);
  add_counted_bytes(static_cast<int64_t>(slot.bytes));
}

void StorageTable::unshare_memory(StorageSlot& slot) {
  slot.storage = copy_storage(slot, slot.bytes);
  slot.clear_views();
  count_graph_storage_change(slot);
}

c10::Storage StorageTable::copy_storage(const StorageSlot& slot, uint64_t bytes) const {
  at::Tensor other = empty_byte_tensor(slot.storage.device(), static_cast<int64_t>(bytes));
  auto kept = static_cast<int64_t>(std::min<uint64_t>(bytes, slot.storage.nbytes()));
  if (kept > 0) {
    TensorMeta meta;
    meta.dtype = at::kByte;
    meta.sizes = {kept};
    meta.strides = {1};
    other.narrow(0, 0, kept).copy_(make_view(slot, meta, 0), /*non_blocking=*/true);
  }
  return other.storage();
}

void StorageTable::resize(StorageSlot& slot, uint64_t bytes) {
  if (slot.failure) throw PoisonedTensor(slot.failure);
  check_quota(bytes > slot.bytes ? bytes - slot.bytes : 0);
  slot.storage = copy_storage(slot, bytes);
  slot.bytes_before_resize = std::max(slot.bytes_before_resize, slot.bytes);
  slot.clear_views();
  count_graph_storage_change(slot);
  update_size_after_op(slot);
}

void StorageTable::free_and_poison(StorageSlot& slot, FailurePtr failure) {
  slot.clear_views();
  count_graph_storage_change(slot);
  slot.storage = c10::Storage();
  add_counted_bytes(-static_cast<int64_t>(slot.bytes));
  slot.bytes = slot.bytes_before_resize = 0;
  slot.failure = std::move(failure);
}

void StorageTable::free(uint32_t number) {
  free_and_poison(existing_slot(number), nullptr);
  counters_.storages.fetch_sub(1, std::memory_order_relaxed);
}

void StorageTable::clear() {
  for (auto& page : pages_) page.reset();
  counters_.storages = 0;
  counters_.counted_bytes = 0;
}

void StorageTable::check_quota(uint64_t more_bytes) const {
  if (bytes_max_ == 0) return;
  uint64_t used = bytes_in_use() +
                  (reply_bytes_ > UNCOUNTED_REPLY_BYTES_MAX ? reply_bytes_ - UNCOUNTED_REPLY_BYTES_MAX : 0);
  if (used <= bytes_max_ && more_bytes <= bytes_max_ - used) return;
  throw QuotaExceeded("tried to allocate " + std::to_string(more_bytes) + " bytes; " + std::to_string(used) +
                      " of the session's " + std::to_string(bytes_max_) + " bytes are in use");
}

void StorageTable::update_size_after_op(StorageSlot& slot) {
  uint64_t now = slot.storage.nbytes();
  if (now != slot.bytes)
    graph_storage_change_count_++;  // it may share its memory with a slot that graphs use
  add_counted_bytes(static_cast<int64_t>(now) - static_cast<int64_t>(slot.bytes));
  slot.bytes = now;
}

void StorageTable::restore_size_after_failed_op(StorageSlot& slot) noexcept {
  if (!slot.storage) return;
  slot.clear_views();
  count_graph_storage_change(slot);
  if (slot.storage.nbytes() == slot.bytes) return;
  try {
    // Frees the memory that the op added.
    slot.storage = copy_storage(slot, slot.bytes);
  } catch (...) {
    // Out of memory: keep the larger storage. No op shrinks one.
    slot.bytes = std::min<uint64_t>(slot.bytes, slot.storage.nbytes());
    slot.storage.set_nbytes(slot.bytes);
  }
}

uint64_t StorageTable::bytes_in_use() const {
  return counters_.counted_bytes.load(std::memory_order_relaxed) +
         counters_.parcel_bytes.load(std::memory_order_relaxed);
}

void StorageTable::add_parcel_bytes(int64_t more_bytes) {
  counters_.parcel_bytes.fetch_add(static_cast<uint64_t>(more_bytes), std::memory_order_relaxed);
}

void StorageTable::add_reply_bytes(int64_t more_bytes) { reply_bytes_ += static_cast<uint64_t>(more_bytes); }

void StorageTable::add_counted_bytes(int64_t more_bytes) {
  // Only the serving thread writes; other threads read.
  uint64_t now = counters_.counted_bytes.load(std::memory_order_relaxed) + static_cast<uint64_t>(more_bytes);
  counters_.counted_bytes.store(now, std::memory_order_relaxed);
  now = bytes_in_use();
  if (now > counters_.counted_bytes_peak.load(std::memory_order_relaxed)) {
    counters_.counted_bytes_peak.store(now, std::memory_order_relaxed);
  }
}

void StorageTable::reset_peak() {
  counters_.counted_bytes_peak.store(bytes_in_use(), std::memory_order_relaxed);
}

at::Tensor StorageTable::allocate_byte_tensor(uint64_t bytes) const {
  return empty_byte_tensor(device_, static_cast<int64_t>(bytes));
}

}  // namespace genie
