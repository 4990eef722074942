// Parcels: copies of tensors that other executors fetch.
//
// The serving thread adds parcels without waiting. Each fetch runs on its own thread, which waits for its
// parcel and then sends it; a fetch may arrive before its parcel exists. Authorization is done in
// genie/executor/listener.py.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include "../stream.h"
#include "../wire.h"
#include "failure.h"
#include "storage_table.h"

namespace genie {

class ParcelStore {
 public:
  ParcelStore(c10::Device device, StorageTable& storages) : device_(device), storages_(storages) {}

  // ProtocolError unless the number is larger than all earlier ones.
  void check_parcel_number_increases(uint64_t parcel_number) const;
  // OpRefused if there are PARCELS_MAX already.
  void check_capacity() const;
  // `tensor` is contiguous, not shared, and written on the current stream.
  void store(uint64_t parcel_number, at::Tensor tensor);
  // A parcel that holds an error. Dropped at once if the store is full.
  void store(uint64_t parcel_number, FailurePtr failure);
  void drop_parcel(uint64_t parcel_number);

  // Thread-safe; called on one thread per fetch. Waits for the parcel, sends it, and waits for the
  // acknowledgement. A newer fetch of the same number cancels this one. True if it was acknowledged.
  bool send_parcel_until_acknowledged(uint64_t parcel_number, const std::shared_ptr<Stream>& stream);
  // Thread-safe.
  size_t parcel_count() const;
  // Thread-safe. Fetches that wait for their parcel or send it.
  uint32_t pending_fetch_count() const;
  // Drops all parcels, cancels all fetches and waits until they have ended.
  void close();

 private:
  // Counts as memory until the last thread that sends it has finished.
  struct Parcel {
    Parcel(StorageTable& table, at::Tensor contents);
    explicit Parcel(FailurePtr why) : failure(std::move(why)) {}
    ~Parcel();
    Parcel(const Parcel&) = delete;
    Parcel& operator=(const Parcel&) = delete;

    StorageTable* storages = nullptr;
    at::Tensor tensor;
    std::optional<c10::Event> contents_written;  // on an accelerator: the contents have been written
    FailurePtr failure;
  };
  using ParcelPtr = std::shared_ptr<const Parcel>;

  void store(uint64_t parcel_number, ParcelPtr parcel);
  bool try_register_fetch(uint64_t parcel_number, const std::shared_ptr<Stream>& stream);
  void unregister_fetch(uint64_t parcel_number, const std::shared_ptr<Stream>& stream);
  // Null if it was dropped or never stored.
  ParcelPtr wait_for_parcel(uint64_t parcel_number, const std::shared_ptr<Stream>& stream);
  bool send_for_registered_fetch(uint64_t parcel_number, const std::shared_ptr<Stream>& stream);
  void write_parcel(const Parcel& parcel, Stream& stream) const;

  c10::Device device_;
  StorageTable& storages_;
  mutable std::mutex mutex_;
  std::condition_variable state_changed_;
  std::unordered_map<uint64_t, ParcelPtr> parcels_;
  std::unordered_map<uint64_t, std::shared_ptr<Stream>> newest_fetch_streams_;  // the newest of each number
  uint64_t last_parcel_number_ = 0;
  uint32_t active_fetch_count_ = 0;
  bool is_closed_ = false;
};

}  // namespace genie
