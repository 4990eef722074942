// Copies of the client's tensors that wait for other executors to fetch them.
//
// The thread that serves puts them here and goes on; each fetch has a thread of its own, which waits until
// its number is here and then sends. A fetch may come before what it asks for. Not for: who may fetch
// (genie/agent/executor/door.py).
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
#include "storages.h"

namespace genie {

class Shelf {
 public:
  Shelf(c10::Device device, StorageTable& storages) : device_(device), storages_(storages) {}

  // ProtocolError unless it is larger than all that were put here.
  void check_number(uint64_t number) const;
  // Refused when there are PARCELS_MAX already.
  void check_place() const;
  // A contiguous tensor that nobody else has, whose contents the current stream makes.
  void put(uint64_t number, at::Tensor own);
  // Why there is none. Forgotten at once when the shelf is full.
  void put(uint64_t number, FailurePtr failure);
  void drop(uint64_t number);

  // From any thread, one for each fetch: waits for the number, sends what is there, and waits until it has
  // arrived. A later fetch of the number takes the place of this one. True when it has been taken.
  bool deliver(uint64_t number, const std::shared_ptr<Stream>& stream);
  // From any thread.
  size_t count() const;
  // Lets everything go. Fetches end, and have ended when this returns.
  void close();

 private:
  // What is under one number. Counts as memory until the last who sends it is done.
  struct Parcel {
    Parcel(StorageTable& table, at::Tensor own);
    explicit Parcel(FailurePtr why) : failure(std::move(why)) {}
    ~Parcel();
    Parcel(const Parcel&) = delete;
    Parcel& operator=(const Parcel&) = delete;

    StorageTable* storages = nullptr;
    at::Tensor tensor;
    std::optional<c10::Event> made;  // on an accelerator: from then on it may be read
    FailurePtr failure;
  };
  using ParcelPtr = std::shared_ptr<const Parcel>;

  void put(uint64_t number, ParcelPtr parcel);
  bool begin(uint64_t number, const std::shared_ptr<Stream>& stream);
  void end(uint64_t number, const std::shared_ptr<Stream>& stream);
  // Null when it was here and is not any more, or never will be.
  ParcelPtr wait_for(uint64_t number, const std::shared_ptr<Stream>& stream);
  bool hand_over(uint64_t number, const std::shared_ptr<Stream>& stream);
  void send(const Parcel& parcel, Stream& stream) const;

  c10::Device device_;
  StorageTable& storages_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<uint64_t, ParcelPtr> parcels_;
  std::unordered_map<uint64_t, std::shared_ptr<Stream>> fetches_;  // the newest of each number
  uint64_t last_ = 0;
  uint32_t delivering_ = 0;
  bool closed_ = false;
};

}  // namespace genie
