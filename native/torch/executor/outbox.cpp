#include "outbox.h"

#include <algorithm>
#include <chrono>

#include <c10/util/Exception.h>

namespace genie {

namespace {

constexpr size_t WRITE_BYTES = 4u << 20;
// For each WRITE_BYTES of it: a client that takes nothing for so long is gone.
constexpr int64_t STALLED_US = 60'000'000;
constexpr int64_t FAREWELL_US = 1'000'000;
// Replies of up to this size are copied, so that what they show may change at once.
constexpr uint64_t COPIED_BYTES_MAX = 1u << 20;
constexpr size_t SPARE_FRAMES_MAX = 4;

ReplyHeader header_of(uint64_t bytes, uint64_t number, uint64_t frames_received, ReplyKind kind) {
  return ReplyHeader{bytes, number, frames_received, kind, 0};
}

// Until the client has closed, so that what was sent last is not lost on the way.
void drain(Stream& stream) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(FAREWELL_US);
  std::vector<uint8_t> thrown_away(64u << 10);
  for (;;) {
    auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return;
    if (stream.read_some(thrown_away.data(), thrown_away.size(), left.count()) == 0) return;
  }
}

}  // namespace

void Outbox::connect(Stream& stream, uint64_t received) {
  stream_ = &stream;
  lost_ = within_reply_ = false;
  replies_received(received);
  for (Reply& reply : kept_) send(reply);
  unacknowledged_frames_ = 0;  // the client was told when it connected
  unacknowledged_bytes_ = 0;
}

void Outbox::frame_received(uint64_t number, size_t bytes) {
  frames_received_.store(number, std::memory_order_relaxed);
  unacknowledged_frames_++;
  unacknowledged_bytes_ += bytes;
}

void Outbox::replies_received(uint64_t number) {
  if (number > last_number_) throw ProtocolError("the client has replies that were never sent");
  while (!kept_.empty() && kept_.front().number <= number) {
    forget(kept_.front());
    kept_.pop_front();
  }
}

void Outbox::forget(Reply& reply) {
  storages_.count_aside(-static_cast<int64_t>(reply.counted_bytes));
  if (reply.lent) lent_--;
  if (spare_frames_.size() < SPARE_FRAMES_MAX) spare_frames_.push_back(std::move(reply.frame));
}

// Memory that was used before: most of the time of a new one would go to finding its pages.
std::vector<uint8_t> Outbox::take_frame(size_t payload_bytes) {
  std::vector<uint8_t> frame;
  if (!spare_frames_.empty()) {
    frame = std::move(spare_frames_.back());
    spare_frames_.pop_back();
  }
  frame.resize(sizeof(ReplyHeader) + payload_bytes);
  return frame;
}

Outbox::Reply& Outbox::keep(ReplyKind kind, std::vector<uint8_t> frame) {
  if (kept_.size() >= REPLIES_UNRECEIVED_MAX) throw ProtocolError("the client asks for more than it takes");
  Reply reply;
  reply.number = ++last_number_;
  reply.kind = kind;
  reply.frame = std::move(frame);
  kept_.push_back(std::move(reply));
  count(kept_.back(), kept_.back().frame.size() - sizeof(ReplyHeader));
  return kept_.back();
}

void Outbox::count(Reply& reply, uint64_t bytes) {
  reply.counted_bytes += bytes;
  storages_.count_aside(static_cast<int64_t>(bytes));
}

void Outbox::reply(const Writer& payload) {
  Reply& reply = keep(ReplyKind::Reply, take_frame(payload.size()));
  std::copy_n(payload.data(), payload.size(), reply.frame.data() + sizeof(ReplyHeader));
  send(reply);
}

void Outbox::reply_error(const Failure& failure) {
  Writer payload;
  write_failure(payload, failure);
  Reply& reply = keep(ReplyKind::Error, take_frame(payload.size()));
  std::copy_n(payload.data(), payload.size(), reply.frame.data() + sizeof(ReplyHeader));
  send(reply);
}

void Outbox::reply_tensor(at::Tensor contiguous, bool own) {
  uint64_t bytes = contiguous.nbytes();
  if (bytes <= COPIED_BYTES_MAX) {
    std::vector<uint8_t> frame = take_frame(bytes);  // before it is kept: reading it may fail
    copies_.read(contiguous, frame.data() + sizeof(ReplyHeader));
    send(keep(ReplyKind::Reply, std::move(frame)));
    return;
  }
  Reply& reply = keep(ReplyKind::Reply, take_frame(0));
  reply.tensor = std::move(contiguous);
  reply.lent = !own;
  if (reply.lent) {
    lent_++;
  } else {
    count(reply, bytes);
  }
  send(reply);
}

void Outbox::send(Reply& reply) {
  if (!stream_) return;
  within_reply_ = true;
  try {
    send_header(reply);
    if (reply.tensor.defined()) {
      copies_.each_piece(reply.tensor, [this](const uint8_t* from, size_t bytes) { write(from, bytes); });
    }
  } catch (const ConnectionLost&) {
    lost_ = true;
    stream_ = nullptr;
    return;
  } catch (const c10::Error& error) {
    throw AcceleratorLost(error.what_without_backtrace());  // half a reply is sent: there is no going on
  }
  within_reply_ = false;
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
}

void Outbox::send_header(Reply& reply) {
  uint64_t payload = reply.frame.size() - sizeof(ReplyHeader);
  if (reply.tensor.defined()) payload = reply.tensor.nbytes();
  ReplyHeader header = header_of(payload, reply.number, frames_received(), reply.kind);
  std::memcpy(reply.frame.data(), &header, sizeof header);
  write(reply.frame.data(), reply.frame.size());
}

void Outbox::write(const void* from, size_t bytes) {
  const auto* next = static_cast<const uint8_t*>(from);
  for (size_t left = bytes; left > 0;) {
    size_t part = std::min(left, WRITE_BYTES);
    stream_->write_all(next, part, STALLED_US, spin_us_);
    next += part;
    left -= part;
  }
}

void Outbox::acknowledge() {
  if (!stream_) return;
  ReplyHeader header = header_of(0, last_number_, frames_received(), ReplyKind::Acknowledge);
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
  try {
    write(&header, sizeof header);
  } catch (const ConnectionLost&) {
    lost_ = true;
    stream_ = nullptr;
  }
}

void Outbox::acknowledge_if_due() {
  bool due = unacknowledged_frames_ >= ACKNOWLEDGE_FRAMES || unacknowledged_bytes_ >= ACKNOWLEDGE_BYTES;
  if (due) acknowledge();
}

void Outbox::say_farewell(const Failure& failure) {
  if (!stream_ || within_reply_) return;
  Writer payload, frame;
  write_failure(payload, failure);
  frame.put(header_of(payload.size(), last_number_, frames_received(), ReplyKind::Farewell));
  frame.raw(payload.data(), payload.size());
  try {
    stream_->write_all(frame.data(), frame.size(), FAREWELL_US);
    drain(*stream_);
  } catch (const ConnectionLost&) {
    lost_ = true;  // the usual end: the client has heard it and left
  }
  stream_ = nullptr;
}

void Outbox::copy_out(const c10::Storage& storage) {
  for (Reply& reply : kept_) {
    if (!reply.lent || !reply.tensor.storage().is_alias_of(storage)) continue;
    at::Tensor copy = reply.tensor.to(c10::kCPU, /*non_blocking=*/false, /*copy=*/true);
    if (copy.nbytes() > reply.counted_bytes) count(reply, copy.nbytes() - reply.counted_bytes);
    reply.tensor = std::move(copy);
    reply.lent = false;
    lent_--;
  }
}

void Outbox::take_over(const c10::Storage& storage, uint64_t bytes) {
  for (Reply& reply : kept_) {
    if (!reply.lent || reply.taken_over || !reply.tensor.storage().is_alias_of(storage)) continue;
    reply.taken_over = true;  // still lent: a graph may write there when it is replayed
    count(reply, bytes);
    bytes = 0;  // several replies may need it; it is there once
  }
}

}  // namespace genie
