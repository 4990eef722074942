#include "storages.h"

#include <algorithm>
#include <string>

#include <ATen/ops/empty.h>

namespace genie {

namespace {

constexpr uint32_t PAGE_SLOTS = 1024;
// Small replies wait here for the client to say that it has them; a session at its quota can still read.
constexpr uint64_t ASIDE_BYTES_FREE = 64u << 20;

at::Tensor empty_on(c10::Device device, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

void Slot::forget_views() {
  for (at::Tensor& view : views) view.reset();
  views_kept = next_view = 0;
}

StorageTable::StorageTable(c10::Device device, uint64_t bytes_max)
    : device_(device),
      bytes_max_(bytes_max),
      keys_(empty_on(device, 0).key_set()),
      cpu_keys_(empty_on(c10::kCPU, 0).key_set()),
      pages_(STORAGES_MAX / PAGE_SLOTS) {}

Slot& StorageTable::at(uint32_t number) {
  if (number >= STORAGES_MAX) {
    throw ProtocolError("storage " + std::to_string(number) + " is beyond the last one");
  }
  auto& page = pages_[number / PAGE_SLOTS];
  if (!page) page = std::make_unique<Slot[]>(PAGE_SLOTS);
  return page[number % PAGE_SLOTS];
}

Slot& StorageTable::known(uint32_t number) {
  Slot& slot = at(number);
  if (slot.taken()) return slot;
  throw ProtocolError("storage " + std::to_string(number) + " is not known to this session");
}

void StorageTable::check_free(uint32_t number) {
  if (at(number).taken()) throw ProtocolError("storage " + std::to_string(number) + " is in use already");
}

const at::Tensor& StorageTable::view(Slot& slot, const Look& look, int64_t offset) {
  if (slot.failure) throw Poisoned(slot.failure);
  if (offset < 0 || offset > OFFSET_MAX) throw ProtocolError("a tensor begins outside of its storage");
  uint64_t end = static_cast<uint64_t>(offset) * look.item_bytes + look.span_bytes;
  if (look.span_bytes && end > slot.bytes) {
    if (end > slot.bytes_once) throw ProtocolError("a tensor reaches beyond its storage");
    throw Refused("a tensor reaches beyond its storage, which was resized to " + std::to_string(slot.bytes) +
                  " bytes and needs " + std::to_string(end) + ": resize it back before the tensor is used");
  }
  for (int i = 0; i < slot.views_kept; i++) {
    if (look.fits(slot.views[i], offset)) return slot.views[i];
  }
  int place = slot.views_kept;
  if (slot.views_kept < VIEWS_KEPT_MAX) {
    slot.views_kept++;
  } else {
    place = slot.next_view;
    slot.next_view = static_cast<uint8_t>((slot.next_view + 1) % VIEWS_KEPT_MAX);
  }
  return slot.views[place] = make_view(slot, look, offset);
}

at::Tensor StorageTable::make_view(const Slot& slot, const Look& look, int64_t offset) const {
  // A number that an op leaves in the CPU's memory stays there, as it does without Genie.
  auto keys = slot.storage.device().is_cpu() ? cpu_keys_ : keys_;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(slot.storage), keys,
                                                             c10::scalarTypeToTypeMeta(look.dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(look.sizes, look.strides, offset);
  if (look.flags & VIEW_CONJUGATE) view._set_conj(true);
  if (look.flags & VIEW_NEGATIVE) view._set_neg(true);
  return view;
}

void StorageTable::keep(uint32_t number, at::Tensor tensor) {
  check_free(number);
  Slot& slot = at(number);
  slot.storage = tensor.storage();
  slot.bytes = slot.storage.nbytes();
  slot.views[0] = std::move(tensor);
  slot.views_kept = 1;
  counters_.storages.fetch_add(1, std::memory_order_relaxed);
  count(static_cast<int64_t>(slot.bytes));
}

void StorageTable::poison(uint32_t number, FailurePtr failure) {
  check_free(number);
  at(number).failure = std::move(failure);
  counters_.storages.fetch_add(1, std::memory_order_relaxed);
}

void StorageTable::allocate(uint32_t number, uint64_t bytes) {
  check_free(number);
  check_room(bytes);
  keep(number, empty_bytes(bytes));
}

void StorageTable::share(uint32_t number, const Slot& with) {
  check_free(number);
  check_room(with.bytes);
  Slot& slot = at(number);
  slot.storage = with.storage;
  slot.bytes = with.bytes;
  slot.bytes_once = with.bytes_once;
  counters_.storages.fetch_add(1, std::memory_order_relaxed);
  count(static_cast<int64_t>(slot.bytes));
}

void StorageTable::unshare(Slot& slot) {
  slot.storage = copied(slot, slot.bytes);
  slot.forget_views();
  changed(slot);
}

c10::Storage StorageTable::copied(const Slot& slot, uint64_t bytes) const {
  at::Tensor other = empty_on(slot.storage.device(), static_cast<int64_t>(bytes));
  auto kept = static_cast<int64_t>(std::min<uint64_t>(bytes, slot.storage.nbytes()));
  if (kept > 0) {
    Look look;
    look.dtype = at::kByte;
    look.sizes = {kept};
    look.strides = {1};
    other.narrow(0, 0, kept).copy_(make_view(slot, look, 0), /*non_blocking=*/true);
  }
  return other.storage();
}

void StorageTable::resize(Slot& slot, uint64_t bytes) {
  if (slot.failure) throw Poisoned(slot.failure);
  check_room(bytes > slot.bytes ? bytes - slot.bytes : 0);
  slot.storage = copied(slot, bytes);
  slot.bytes_once = std::max(slot.bytes_once, slot.bytes);
  slot.forget_views();
  changed(slot);
  recount(slot);
}

void StorageTable::spoil(Slot& slot, FailurePtr failure) {
  slot.forget_views();
  changed(slot);
  slot.storage = c10::Storage();
  count(-static_cast<int64_t>(slot.bytes));
  slot.bytes = slot.bytes_once = 0;
  slot.failure = std::move(failure);
}

void StorageTable::free(uint32_t number) {
  spoil(known(number), nullptr);
  counters_.storages.fetch_sub(1, std::memory_order_relaxed);
}

void StorageTable::clear() {
  for (auto& page : pages_) page.reset();
  counters_.storages = 0;
  counters_.bytes = 0;
}

void StorageTable::check_room(uint64_t more_bytes) const {
  if (bytes_max_ == 0) return;
  uint64_t used = bytes_in_use() + (aside_bytes_ > ASIDE_BYTES_FREE ? aside_bytes_ - ASIDE_BYTES_FREE : 0);
  if (used <= bytes_max_ && more_bytes <= bytes_max_ - used) return;
  throw OverQuota("tried to take " + std::to_string(more_bytes) + " bytes; " + std::to_string(used) +
                  " of this session's " + std::to_string(bytes_max_) + " bytes are in use");
}

void StorageTable::recount(Slot& slot) {
  uint64_t now = slot.storage.nbytes();
  if (now != slot.bytes) watched_changes_++;  // it may share its memory with one that has watchers
  count(static_cast<int64_t>(now) - static_cast<int64_t>(slot.bytes));
  slot.bytes = now;
}

void StorageTable::restore(Slot& slot) noexcept {
  if (!slot.storage) return;
  slot.forget_views();
  changed(slot);
  if (slot.storage.nbytes() == slot.bytes) return;
  try {
    // Of the old size, so that no memory beyond the quota stays taken.
    slot.storage = copied(slot, slot.bytes);
  } catch (...) {
    // There is no memory for it: then the larger one stays. No op makes one smaller.
    slot.bytes = std::min<uint64_t>(slot.bytes, slot.storage.nbytes());
    slot.storage.set_nbytes(slot.bytes);
  }
}

uint64_t StorageTable::bytes_in_use() const {
  return counters_.bytes.load(std::memory_order_relaxed) +
         counters_.shelved_bytes.load(std::memory_order_relaxed);
}

void StorageTable::count_shelved(int64_t more_bytes) {
  counters_.shelved_bytes.fetch_add(static_cast<uint64_t>(more_bytes), std::memory_order_relaxed);
}

void StorageTable::count_aside(int64_t more_bytes) { aside_bytes_ += static_cast<uint64_t>(more_bytes); }

void StorageTable::count(int64_t more_bytes) {
  // One thread writes; the atomics are for those who look on.
  uint64_t now = counters_.bytes.load(std::memory_order_relaxed) + static_cast<uint64_t>(more_bytes);
  counters_.bytes.store(now, std::memory_order_relaxed);
  now = bytes_in_use();
  if (now > counters_.bytes_peak.load(std::memory_order_relaxed)) {
    counters_.bytes_peak.store(now, std::memory_order_relaxed);
  }
}

void StorageTable::forget_peak() { counters_.bytes_peak.store(bytes_in_use(), std::memory_order_relaxed); }

at::Tensor StorageTable::empty_bytes(uint64_t bytes) const {
  return empty_on(device_, static_cast<int64_t>(bytes));
}

}  // namespace genie
