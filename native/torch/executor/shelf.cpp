#include "shelf.h"

#include <algorithm>
#include <chrono>
#include <string>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "copies.h"

namespace genie {

namespace {

// How soon a fetch that waits notices that whoever fetches has left.
constexpr auto LOOK = std::chrono::milliseconds(500);
constexpr size_t WRITE_BYTES = 4u << 20;
// For each WRITE_BYTES of it, and for the byte that says that all has arrived.
constexpr int64_t STALLED_US = 60'000'000;

// What a thread that sends needs: the device, a stream on which it holds nobody up, and no autograd.
struct SendingThread {
  explicit SendingThread(c10::Device device) : device_guard(device) {
    if (device.is_cpu()) return;
    stream_guard.reset_stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }

  c10::DeviceGuard device_guard;
  c10::OptionalStreamGuard stream_guard;
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

void write(Stream& stream, const uint8_t* from, size_t bytes) {
  for (size_t left = bytes; left > 0;) {
    size_t part = std::min(left, WRITE_BYTES);
    stream.write_all(from, part, STALLED_US);
    from += part;
    left -= part;
  }
}

void write_header(Stream& stream, uint64_t bytes, ParcelKind kind) {
  ParcelHeader header{bytes, kind, 0};
  stream.write_all(&header, sizeof header, STALLED_US);
}

void write_failed(Stream& stream, const Failure& failure) {
  Writer payload;
  write_failure(payload, failure);
  write_header(stream, payload.size(), ParcelKind::Failure);
  write(stream, payload.data(), payload.size());
}

// Whoever fetches says nothing before it has been sent something. ConnectionLost when it has left.
void check_waits(Stream& stream) {
  uint8_t said;
  if (stream.read_some(&said, 1, 0) > 0) throw ConnectionLost("it spoke before it was its turn");
}

}  // namespace

Shelf::Parcel::Parcel(StorageTable& table, at::Tensor own) : storages(&table), tensor(std::move(own)) {
  storages->count_shelved(static_cast<int64_t>(tensor.nbytes()));
  if (tensor.device().is_cpu()) return;
  made.emplace(tensor.device().type());
  made->record(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

Shelf::Parcel::~Parcel() {
  if (storages) storages->count_shelved(-static_cast<int64_t>(tensor.nbytes()));
}

// --- the thread that serves ---------------------------------------------------------------------

void Shelf::check_number(uint64_t number) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number <= last_) {
    throw ProtocolError("parcel " + std::to_string(number) + " came after " + std::to_string(last_));
  }
}

void Shelf::check_place() const {
  if (count() < PARCELS_MAX) return;
  throw Refused("this executor holds " + std::to_string(PARCELS_MAX) +
                " copies that other executors have not fetched yet; wait for those (synchronize) first");
}

void Shelf::put(uint64_t number, at::Tensor own) {
  put(number, std::make_shared<Parcel>(storages_, std::move(own)));
  storages_.count(0);  // the peak
}

void Shelf::put(uint64_t number, FailurePtr failure) {
  put(number, std::make_shared<Parcel>(std::move(failure)));
}

void Shelf::put(uint64_t number, ParcelPtr parcel) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_ = number;
  if (!closed_ && parcels_.size() < PARCELS_MAX) parcels_.emplace(number, std::move(parcel));
  changed_.notify_all();
}

void Shelf::drop(uint64_t number) {
  ParcelPtr dropped;  // goes after the lock: freeing memory may take a while
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = parcels_.find(number);
  if (found == parcels_.end()) return;
  dropped = std::move(found->second);
  parcels_.erase(found);
}

size_t Shelf::count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parcels_.size();
}

void Shelf::close() {
  std::unordered_map<uint64_t, ParcelPtr> dropped;
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  dropped.swap(parcels_);
  for (auto& [number, stream] : fetches_) stream->shut_down();
  changed_.notify_all();
  changed_.wait(lock, [this] { return delivering_ == 0; });
}

// --- the threads that send ----------------------------------------------------------------------

bool Shelf::deliver(uint64_t number, const std::shared_ptr<Stream>& stream) {
  if (!begin(number, stream)) return false;
  bool taken = false;
  try {
    taken = hand_over(number, stream);
  } catch (const ConnectionLost&) {
    // It may come again, for as long as its number is here.
  } catch (const c10::Error&) {
    // The accelerator's; whoever serves the client meets it, too.
  } catch (...) {
    end(number, stream);
    throw;
  }
  end(number, stream);
  return taken;
}

bool Shelf::begin(uint64_t number, const std::shared_ptr<Stream>& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return false;
  auto& newest = fetches_[number];
  if (newest) newest->shut_down();  // its connection broke, and only this side has not noticed
  newest = stream;
  delivering_++;
  changed_.notify_all();
  return true;
}

void Shelf::end(uint64_t number, const std::shared_ptr<Stream>& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto newest = fetches_.find(number);
  if (newest != fetches_.end() && newest->second == stream) fetches_.erase(newest);
  delivering_--;
  changed_.notify_all();
}

Shelf::ParcelPtr Shelf::wait_for(uint64_t number, const std::shared_ptr<Stream>& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto replaced = [&] {
    auto newest = fetches_.find(number);
    return closed_ || newest == fetches_.end() || newest->second != stream;
  };
  while (!changed_.wait_for(lock, LOOK, [&] { return number <= last_ || replaced(); })) {
    lock.unlock();
    check_waits(*stream);
    lock.lock();
  }
  if (replaced()) throw ConnectionLost("another one has taken its place");
  auto found = parcels_.find(number);
  return found == parcels_.end() ? nullptr : found->second;
}

bool Shelf::hand_over(uint64_t number, const std::shared_ptr<Stream>& stream) {
  ParcelPtr parcel = wait_for(number, stream);
  if (!parcel) {
    write_failed(*stream, {"device.unavailable", "", 0,
                           "parcel " + std::to_string(number) +
                               " is not there: it was fetched or taken back already, or there was no place"});
    return false;
  }
  send(*parcel, *stream);
  uint8_t said = 0;
  stream->read_exactly(&said, 1, STALLED_US);
  if (said != PARCEL_TAKEN) return false;
  drop(number);
  return true;
}

void Shelf::send(const Parcel& parcel, Stream& stream) const {
  if (parcel.failure) {
    write_failed(stream, *parcel.failure);
    return;
  }
  SendingThread thread(device_);
  if (parcel.made) {
    parcel.made->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  write_header(stream, parcel.tensor.nbytes(), ParcelKind::Contents);
  Copies copies(device_);
  copies.each_piece(parcel.tensor, [&](const uint8_t* from, size_t bytes) { write(stream, from, bytes); });
}

}  // namespace genie
