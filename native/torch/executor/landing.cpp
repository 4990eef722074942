#include "landing.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* LOST = "device.lost";
constexpr const char* PROTOCOL = "transport.protocol";
constexpr const char* NOTHING_LISTENS = "transport.unreachable.nothing_listens";
constexpr int64_t SLICE_US = 200'000;
// Once contents have begun to come. Before that the other executor may have much to do.
constexpr auto STALLED = std::chrono::seconds(60);
constexpr int64_t TAKEN_US = 10'000'000;
// How long it is tried to connect again, and how often a connection may break.
constexpr auto CONNECT_AGAIN = std::chrono::seconds(20);
constexpr int BREAKS_MAX = 5;
constexpr auto STEP = std::chrono::milliseconds(50);
constexpr auto STEP_MAX = std::chrono::milliseconds(1000);

// The connection to the other executor; another one may fare better.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Meanwhile = std::function<void()>;

// `limit`: how long nothing may come.
void read(Stream& stream, void* into, size_t size, std::optional<Clock::duration> limit,
          const Meanwhile& meanwhile) {
  auto* next = static_cast<uint8_t*>(into);
  auto heard = Clock::now();
  for (size_t left = size; left > 0;) {
    size_t got;
    try {
      got = stream.read_some(next, left, SLICE_US);
    } catch (const ConnectionLost& error) {
      throw Broken(error.what());
    }
    next += got;
    left -= got;
    if (got > 0) {
      heard = Clock::now();
    } else if (limit && Clock::now() - heard > *limit) {
      throw CopyFailed(LOST, "nothing came for a minute in the middle of it");
    }
    meanwhile();
  }
}

void say_taken(Stream& stream) noexcept {
  try {
    stream.write_all(&PARCEL_TAKEN, 1, TAKEN_US);
  } catch (const std::exception&) {
    // All is here. The other keeps it until the client tells it that nobody needs it.
    stream.shut_down();
  }
}

[[noreturn]] void raise_what_it_says(Stream& stream, uint64_t bytes, const Meanwhile& meanwhile) {
  if (bytes > PARCEL_FAILURE_BYTES_MAX) throw CopyFailed(PROTOCOL, "it does not keep to the wire");
  std::vector<uint8_t> payload(bytes);
  read(stream, payload.data(), payload.size(), STALLED, meanwhile);
  say_taken(stream);
  Failure failure;
  try {
    Reader in(payload.data(), payload.size());
    failure.code = in.text();
    failure.op = in.text();
    in.u64();
    failure.message = in.text();
  } catch (const ProtocolError&) {
    throw CopyFailed(PROTOCOL, "it does not keep to the wire");
  }
  throw CopyFailed(failure.code, failure.message + (failure.op.empty() ? "" : " [" + failure.op + " there]"));
}

std::string bounded_text(Reader& in, size_t bytes_max) {
  std::string text = in.text();
  if (text.size() > bytes_max) throw ProtocolError("an address is longer than allowed");
  return text;
}

}  // namespace

Origin read_origin(Reader& in) {
  Origin origin;
  origin.host = bounded_text(in, HOST_BYTES_MAX);
  origin.port = in.u32();
  if (origin.port == 0 || origin.port > 65535) throw ProtocolError("a port is out of range");
  origin.server_name = bounded_text(in, HOST_BYTES_MAX);
  origin.number = in.u64();
  origin.token = bounded_text(in, HOST_BYTES_MAX);
  origin.source = bounded_text(in, HOST_BYTES_MAX);
  return origin;
}

void Landing::run(const Origin& origin, const at::Tensor& target, const at::Tensor& staged, uint64_t bytes,
                  const Meanwhile& meanwhile) {
  struct LetGo {
    Upload& upload;
    ~LetGo() { upload.abandon(); }
  } let_go{upload_};
  for (int breaks = 0;; breaks++) {
    std::shared_ptr<Stream> stream = connect(origin, meanwhile);
    try {
      upload_.begin(target, staged, bytes);
      receive(*stream, bytes, meanwhile);
      return say_taken(*stream);
    } catch (const Broken& error) {
      stream->shut_down();
      if (breaks == BREAKS_MAX) throw CopyFailed(LOST, error.what());
    } catch (...) {
      stream->shut_down();  // whoever connected keeps it for the next one, unless it is of no use any more
      throw;
    }
  }
}

std::shared_ptr<Stream> Landing::connect(const Origin& origin, const Meanwhile& meanwhile) {
  if (!fetch_) throw CopyFailed("device.op_refused", "this executor fetches from no other");
  auto end = Clock::now() + CONNECT_AGAIN;
  for (auto step = STEP;; step = std::min(2 * step, STEP_MAX)) {
    try {
      return fetch_(origin);
    } catch (const FetchRefused& refused) {
      // A port that refuses is no cut: whoever listened there has ended.
      if (refused.code == NOTHING_LISTENS) throw CopyFailed(LOST, refused.what());
      if (!refused.again || Clock::now() > end) throw CopyFailed(refused.code, refused.what());
    }
    std::this_thread::sleep_for(step);
    meanwhile();
  }
}

void Landing::receive(Stream& stream, uint64_t bytes, const Meanwhile& meanwhile) {
  ParcelHeader header;
  read(stream, &header, sizeof header, std::nullopt, meanwhile);
  if (header.kind == ParcelKind::Failure) raise_what_it_says(stream, header.bytes, meanwhile);
  if (header.kind != ParcelKind::Contents) throw CopyFailed(PROTOCOL, "it does not keep to the wire");
  if (header.bytes != bytes) {
    throw CopyFailed(PROTOCOL, "it has " + std::to_string(header.bytes) + " bytes where " +
                                   std::to_string(bytes) + " were due");
  }
  if (bytes == 0) upload_.fill(nullptr);
  for (uint64_t left = bytes; left > 0;) {
    size_t piece = std::min<uint64_t>(left, FRAME_BYTES_MAX);
    read(stream, upload_.place(piece), piece, STALLED, meanwhile);
    upload_.arrived(piece);
    left -= piece;
  }
}

}  // namespace genie
