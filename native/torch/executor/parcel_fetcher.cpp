#include "parcel_fetcher.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* DEVICE_LOST_CODE = "device.lost";
constexpr const char* NO_CONNECTOR_REASON = "transport.unreachable.nothing_listens";
constexpr int64_t KEEP_ALIVE_POLL_US = 200'000;
// Timeout between bytes of a parcel. There is none before the first: the parcel may not exist yet.
constexpr auto PARCEL_STALL_TIMEOUT = std::chrono::seconds(60);
constexpr int64_t ACKNOWLEDGE_TIMEOUT_US = 10'000'000;
constexpr auto RECONNECT_TIMEOUT = std::chrono::seconds(20);
constexpr int RECONNECTS_MAX = 5;
constexpr auto RECONNECT_BACKOFF_MIN = std::chrono::milliseconds(50);
constexpr auto RECONNECT_BACKOFF_MAX = std::chrono::milliseconds(1000);

// The connection to the other executor broke; a reconnect may succeed.
struct FetchInterrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using KeepAliveFunction = std::function<void()>;

// `timeout`: maximum time between bytes.
void read_with_keep_alive(Stream& stream, void* buffer, size_t size, std::optional<Clock::duration> timeout,
                          const KeepAliveFunction& keep_alive) {
  auto* next = static_cast<uint8_t*>(buffer);
  auto last_read = Clock::now();
  for (size_t left = size; left > 0;) {
    size_t got;
    try {
      got = stream.read_some(next, left, KEEP_ALIVE_POLL_US);
    } catch (const ConnectionLost& error) {
      throw FetchInterrupted(error.what());
    }
    next += got;
    left -= got;
    if (got > 0) {
      last_read = Clock::now();
    } else if (timeout && Clock::now() - last_read > *timeout) {
      throw TransferFailed(DEVICE_LOST_CODE, "the connection stalled for 60 s during the transfer");
    }
    keep_alive();
  }
}

void acknowledge_parcel(Stream& stream) noexcept {
  try {
    stream.write_all(&PARCEL_ACKNOWLEDGED, 1, ACKNOWLEDGE_TIMEOUT_US);
  } catch (const std::exception&) {
    // The contents are complete. The other executor keeps the parcel until the client drops it.
    stream.shut_down();
  }
}

[[noreturn]] void throw_parcel_failure(Stream& stream, uint64_t bytes, const KeepAliveFunction& keep_alive) {
  if (bytes > PARCEL_FAILURE_BYTES_MAX)
    throw TransferFailed(PROTOCOL_ERROR_CODE, "the other executor violated the protocol");
  std::vector<uint8_t> payload(bytes);
  read_with_keep_alive(stream, payload.data(), payload.size(), PARCEL_STALL_TIMEOUT, keep_alive);
  acknowledge_parcel(stream);
  Failure failure;
  try {
    WireReader in(payload.data(), payload.size());
    failure = read_remote_error(in);
  } catch (const ProtocolError&) {
    throw TransferFailed(PROTOCOL_ERROR_CODE, "the other executor violated the protocol");
  }
  throw TransferFailed(
      failure.code,
      failure.message + (failure.op.empty() ? "" : " [" + failure.op + " on the other executor]"));
}

}  // namespace

void ParcelFetcher::fetch(const ParcelOrigin& origin, const at::Tensor& target,
                          const at::Tensor& staging_tensor, uint64_t bytes,
                          const KeepAliveFunction& keep_alive) {
  struct DiscardUploadGuard {
    Upload& upload;
    ~DiscardUploadGuard() { upload.discard(); }
  } discard_upload{upload_};
  for (int reconnects = 0;; reconnects++) {
    std::shared_ptr<Stream> stream = connect_with_retries(origin, keep_alive);
    try {
      upload_.begin(target, staging_tensor, bytes);
      receive_parcel_contents(*stream, bytes, keep_alive);
      return acknowledge_parcel(*stream);
    } catch (const FetchInterrupted& error) {
      stream->shut_down();
      if (reconnects == RECONNECTS_MAX) throw TransferFailed(DEVICE_LOST_CODE, error.what());
    } catch (...) {
      stream->shut_down();  // so that the connector does not reuse it
      throw;
    }
  }
}

std::shared_ptr<Stream> ParcelFetcher::connect_with_retries(const ParcelOrigin& origin,
                                                            const KeepAliveFunction& keep_alive) {
  if (!connector_)
    throw TransferFailed("device.op_refused", "this executor cannot fetch from other executors");
  auto end = Clock::now() + RECONNECT_TIMEOUT;
  for (auto backoff = RECONNECT_BACKOFF_MIN;; backoff = std::min(2 * backoff, RECONNECT_BACKOFF_MAX)) {
    try {
      return connector_(origin);
    } catch (const ParcelConnectError& error) {
      // A refused connection is not an interruption: the other executor has ended.
      if (error.code == NO_CONNECTOR_REASON) throw TransferFailed(DEVICE_LOST_CODE, error.what());
      if (!error.retryable || Clock::now() > end) throw TransferFailed(error.code, error.what());
    }
    std::this_thread::sleep_for(backoff);
    keep_alive();
  }
}

void ParcelFetcher::receive_parcel_contents(Stream& stream, uint64_t bytes,
                                            const KeepAliveFunction& keep_alive) {
  TensorParcelHeader header;
  read_with_keep_alive(stream, &header, sizeof header, std::nullopt, keep_alive);
  if (header.kind == ParcelKind::Failure) throw_parcel_failure(stream, header.bytes, keep_alive);
  if (header.kind != ParcelKind::Contents)
    throw TransferFailed(PROTOCOL_ERROR_CODE, "the other executor violated the protocol");
  if (header.bytes != bytes) {
    throw TransferFailed(PROTOCOL_ERROR_CODE, "the parcel has " + std::to_string(header.bytes) +
                                                  " bytes, expected " + std::to_string(bytes));
  }
  if (bytes == 0) upload_.write_all_bytes(nullptr);
  for (uint64_t left = bytes; left > 0;) {
    size_t chunk = std::min<uint64_t>(left, FRAME_BYTES_MAX);
    read_with_keep_alive(stream, upload_.next_destination(chunk), chunk, PARCEL_STALL_TIMEOUT, keep_alive);
    upload_.finish_write(chunk);
    left -= chunk;
  }
}

}  // namespace genie
