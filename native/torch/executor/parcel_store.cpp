#include "parcel_store.h"

#include <algorithm>
#include <chrono>
#include <string>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "stream_limits.h"
#include "staging.h"

namespace genie {

namespace {

// How often a pending fetch checks that its peer is still connected.
constexpr auto PEER_CHECK_INTERVAL = std::chrono::milliseconds(500);

// State of a sending thread: the device, a separate stream, and no autograd.
struct SendingThreadGuards {
  explicit SendingThreadGuards(c10::Device device) : device_guard(device) {
    if (device.is_cpu()) return;
    stream_guard.reset_stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }

  c10::DeviceGuard device_guard;
  c10::OptionalStreamGuard stream_guard;
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

void write_chunks(Stream& stream, const uint8_t* data, size_t bytes) {
  for (size_t left = bytes; left > 0;) {
    size_t part = std::min(left, WRITE_CHUNK_BYTES);
    stream.write_all(data, part, STALL_TIMEOUT_US);
    data += part;
    left -= part;
  }
}

void write_parcel_header(Stream& stream, uint64_t bytes, ParcelKind kind) {
  TensorParcelHeader header{bytes, kind, 0};
  stream.write_all(&header, sizeof header, STALL_TIMEOUT_US);
}

void write_parcel_failure(Stream& stream, const Failure& failure) {
  WireWriter payload;
  write_remote_error(payload, failure);
  write_parcel_header(stream, payload.size(), ParcelKind::Failure);
  write_chunks(stream, payload.data(), payload.size());
}

// The peer sends nothing before it has received the parcel. ConnectionLost if it has disconnected.
void check_peer_connected(Stream& stream) {
  uint8_t byte;
  if (stream.read_some(&byte, 1, 0) > 0)
    throw ConnectionLost("the peer sent data before it received the parcel");
}

}  // namespace

ParcelStore::Parcel::Parcel(StorageTable& table, at::Tensor contents)
    : storages(&table), tensor(std::move(contents)) {
  storages->add_parcel_bytes(static_cast<int64_t>(tensor.nbytes()));
  if (tensor.device().is_cpu()) return;
  contents_written.emplace(tensor.device().type());
  contents_written->record(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

ParcelStore::Parcel::~Parcel() {
  if (storages) storages->add_parcel_bytes(-static_cast<int64_t>(tensor.nbytes()));
}

// --- serving thread -----------------------------------------------------------------------------

void ParcelStore::check_parcel_number_increases(uint64_t parcel_number) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (parcel_number <= last_parcel_number_) {
    throw ProtocolError("parcel " + std::to_string(parcel_number) + " was published after parcel " +
                        std::to_string(last_parcel_number_));
  }
}

void ParcelStore::check_capacity() const {
  if (parcel_count() < PARCELS_MAX) return;
  throw OpRefused("this executor holds " + std::to_string(PARCELS_MAX) +
                  " parcels that other executors have not fetched yet; synchronize first");
}

void ParcelStore::store(uint64_t parcel_number, at::Tensor tensor) {
  store(parcel_number, std::make_shared<Parcel>(storages_, std::move(tensor)));
  storages_.add_counted_bytes(0);  // updates the peak
}

void ParcelStore::store(uint64_t parcel_number, FailurePtr failure) {
  store(parcel_number, std::make_shared<Parcel>(std::move(failure)));
}

void ParcelStore::store(uint64_t parcel_number, ParcelPtr parcel) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_parcel_number_ = parcel_number;
  if (!is_closed_ && parcels_.size() < PARCELS_MAX) parcels_.emplace(parcel_number, std::move(parcel));
  state_changed_.notify_all();
}

void ParcelStore::drop_parcel(uint64_t parcel_number) {
  ParcelPtr dropped;  // destroyed after the lock is released: freeing memory may take a while
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = parcels_.find(parcel_number);
  if (found == parcels_.end()) return;
  dropped = std::move(found->second);
  parcels_.erase(found);
}

size_t ParcelStore::parcel_count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parcels_.size();
}

uint32_t ParcelStore::pending_fetch_count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return active_fetch_count_;
}

void ParcelStore::close() {
  std::unordered_map<uint64_t, ParcelPtr> dropped;
  std::unique_lock<std::mutex> lock(mutex_);
  is_closed_ = true;
  dropped.swap(parcels_);
  for (auto& [number, stream] : newest_fetch_streams_) stream->shut_down();
  state_changed_.notify_all();
  state_changed_.wait(lock, [this] { return active_fetch_count_ == 0; });
}

// --- sending threads ----------------------------------------------------------------------------

bool ParcelStore::send_parcel_until_acknowledged(uint64_t parcel_number,
                                                 const std::shared_ptr<Stream>& stream) {
  if (!try_register_fetch(parcel_number, stream)) return false;
  bool acknowledged = false;
  try {
    acknowledged = send_for_registered_fetch(parcel_number, stream);
  } catch (const ConnectionLost&) {
    // It may be fetched again until it is dropped.
  } catch (const c10::Error&) {
    // An accelerator error; the serving thread gets and reports it, too.
  } catch (...) {
    unregister_fetch(parcel_number, stream);
    throw;
  }
  unregister_fetch(parcel_number, stream);
  return acknowledged;
}

bool ParcelStore::try_register_fetch(uint64_t parcel_number, const std::shared_ptr<Stream>& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_closed_) return false;
  auto& newest = newest_fetch_streams_[parcel_number];
  if (newest) newest->shut_down();  // its peer has reconnected
  newest = stream;
  active_fetch_count_++;
  state_changed_.notify_all();
  return true;
}

void ParcelStore::unregister_fetch(uint64_t parcel_number, const std::shared_ptr<Stream>& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto newest = newest_fetch_streams_.find(parcel_number);
  if (newest != newest_fetch_streams_.end() && newest->second == stream) newest_fetch_streams_.erase(newest);
  active_fetch_count_--;
  state_changed_.notify_all();
}

ParcelStore::ParcelPtr ParcelStore::wait_for_parcel(uint64_t parcel_number,
                                                    const std::shared_ptr<Stream>& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto replaced = [&] {
    auto newest = newest_fetch_streams_.find(parcel_number);
    return is_closed_ || newest == newest_fetch_streams_.end() || newest->second != stream;
  };
  while (!state_changed_.wait_for(lock, PEER_CHECK_INTERVAL,
                                  [&] { return parcel_number <= last_parcel_number_ || replaced(); })) {
    lock.unlock();
    check_peer_connected(*stream);
    lock.lock();
  }
  if (replaced()) throw ConnectionLost("replaced by a newer fetch");
  auto found = parcels_.find(parcel_number);
  return found == parcels_.end() ? nullptr : found->second;
}

bool ParcelStore::send_for_registered_fetch(uint64_t parcel_number, const std::shared_ptr<Stream>& stream) {
  ParcelPtr parcel = wait_for_parcel(parcel_number, stream);
  if (!parcel) {
    write_parcel_failure(*stream,
                         {"device.unavailable", "", 0,
                          "parcel " + std::to_string(parcel_number) +
                              " does not exist: it was fetched or dropped, or the parcel store was full"});
    return false;
  }
  write_parcel(*parcel, *stream);
  uint8_t acknowledgement = 0;
  stream->read_exactly(&acknowledgement, 1, STALL_TIMEOUT_US);
  if (acknowledgement != PARCEL_ACKNOWLEDGED) return false;
  drop_parcel(parcel_number);
  return true;
}

void ParcelStore::write_parcel(const Parcel& parcel, Stream& stream) const {
  if (parcel.failure) {
    write_parcel_failure(stream, *parcel.failure);
    return;
  }
  SendingThreadGuards thread(device_);
  if (parcel.contents_written) {
    parcel.contents_written->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  write_parcel_header(stream, parcel.tensor.nbytes(), ParcelKind::Contents);
  StagingBuffers staging(device_);
  staging.for_each_chunk(parcel.tensor,
                         [&](const uint8_t* from, size_t bytes) { write_chunks(stream, from, bytes); });
}

}  // namespace genie
