#include "reply_writer.h"

#include <algorithm>
#include <chrono>

#include <c10/util/Exception.h>

#include "limits.h"

namespace genie {

namespace {

constexpr int64_t FATAL_TIMEOUT_US = 1'000'000;
// Tensors up to this size are copied into the reply instead of borrowed.
constexpr uint64_t COPIED_REPLY_BYTES_MAX = 1u << 20;
constexpr size_t SPARE_FRAMES_MAX = 4;

ReplyHeader make_reply_header(uint64_t bytes, uint64_t number, uint64_t frames_received, ReplyKind kind) {
  return ReplyHeader{bytes, number, frames_received, kind, 0};
}

// Reads until the client closes the connection: closing it first could drop data that was sent last.
void drain_until_closed(Stream& stream) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(FATAL_TIMEOUT_US);
  std::vector<uint8_t> discarded(64u << 10);
  for (;;) {
    auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return;
    if (stream.read_some(discarded.data(), discarded.size(), left.count()) == 0) return;
  }
}

}  // namespace

void ReplyWriter::connect(Stream& stream, uint64_t received) {
  stream_ = &stream;
  lost_ = within_reply_ = false;
  release_replies(received);
  for (Reply& reply : unreceived_) send(reply);
  unacknowledged_frames_ = 0;  // the handshake reply contained the number
  unacknowledged_bytes_ = 0;
}

void ReplyWriter::count_frame(uint64_t number, size_t bytes) {
  frames_received_.store(number, std::memory_order_relaxed);
  unacknowledged_frames_++;
  unacknowledged_bytes_ += bytes;
}

void ReplyWriter::release_replies(uint64_t number) {
  if (number > last_number_) throw ProtocolError("the client acknowledged replies that were never sent");
  while (!unreceived_.empty() && unreceived_.front().number <= number) {
    release(unreceived_.front());
    unreceived_.pop_front();
  }
}

void ReplyWriter::release(Reply& reply) {
  storages_.add_reply_bytes(-static_cast<int64_t>(reply.counted_bytes));
  if (reply.borrowed) borrowed_--;
  if (spare_frames_.size() < SPARE_FRAMES_MAX) spare_frames_.push_back(std::move(reply.frame));
}

// Reuses memory: page faults would dominate the cost of a new frame.
std::vector<uint8_t> ReplyWriter::new_frame(size_t payload_bytes) {
  std::vector<uint8_t> frame;
  if (!spare_frames_.empty()) {
    frame = std::move(spare_frames_.back());
    spare_frames_.pop_back();
  }
  frame.resize(sizeof(ReplyHeader) + payload_bytes);
  return frame;
}

ReplyWriter::Reply& ReplyWriter::add_reply(ReplyKind kind, std::vector<uint8_t> frame) {
  if (unreceived_.size() >= UNRECEIVED_REPLIES_MAX)
    throw ProtocolError("too many replies that the client has not received");
  Reply reply;
  reply.number = ++last_number_;
  reply.kind = kind;
  reply.frame = std::move(frame);
  unreceived_.push_back(std::move(reply));
  count_bytes(unreceived_.back(), unreceived_.back().frame.size() - sizeof(ReplyHeader));
  return unreceived_.back();
}

void ReplyWriter::count_bytes(Reply& reply, uint64_t bytes) {
  reply.counted_bytes += bytes;
  storages_.add_reply_bytes(static_cast<int64_t>(bytes));
}

void ReplyWriter::reply(const Writer& payload) {
  Reply& reply = add_reply(ReplyKind::Reply, new_frame(payload.size()));
  std::copy_n(payload.data(), payload.size(), reply.frame.data() + sizeof(ReplyHeader));
  send(reply);
}

void ReplyWriter::reply_error(const Failure& failure) {
  Writer payload;
  write_error(payload, failure);
  Reply& reply = add_reply(ReplyKind::Error, new_frame(payload.size()));
  std::copy_n(payload.data(), payload.size(), reply.frame.data() + sizeof(ReplyHeader));
  send(reply);
}

void ReplyWriter::reply_tensor(at::Tensor contiguous, bool owned) {
  uint64_t bytes = contiguous.nbytes();
  if (bytes <= COPIED_REPLY_BYTES_MAX) {
    std::vector<uint8_t> frame = new_frame(bytes);  // before add_reply(): reading may fail
    staging_.read(contiguous, frame.data() + sizeof(ReplyHeader));
    send(add_reply(ReplyKind::Reply, std::move(frame)));
    return;
  }
  Reply& reply = add_reply(ReplyKind::Reply, new_frame(0));
  reply.tensor = std::move(contiguous);
  reply.borrowed = !owned;
  if (reply.borrowed) {
    borrowed_++;
  } else {
    count_bytes(reply, bytes);
  }
  send(reply);
}

void ReplyWriter::send(Reply& reply) {
  if (!stream_) return;
  within_reply_ = true;
  try {
    send_header(reply);
    if (reply.tensor.defined()) {
      staging_.for_each_chunk(reply.tensor,
                              [this](const uint8_t* from, size_t bytes) { write(from, bytes); });
    }
  } catch (const ConnectionLost&) {
    lost_ = true;
    stream_ = nullptr;
    return;
  } catch (const c10::Error& error) {
    throw AcceleratorFailed(
        error.what_without_backtrace());  // the reply is incomplete: the session cannot continue
  }
  within_reply_ = false;
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
}

void ReplyWriter::send_header(Reply& reply) {
  uint64_t payload = reply.frame.size() - sizeof(ReplyHeader);
  if (reply.tensor.defined()) payload = reply.tensor.nbytes();
  ReplyHeader header = make_reply_header(payload, reply.number, frames_received(), reply.kind);
  std::memcpy(reply.frame.data(), &header, sizeof header);
  write(reply.frame.data(), reply.frame.size());
}

void ReplyWriter::write(const void* from, size_t bytes) {
  const auto* next = static_cast<const uint8_t*>(from);
  for (size_t left = bytes; left > 0;) {
    size_t part = std::min(left, WRITE_CHUNK_BYTES);
    stream_->write_all(next, part, STALL_TIMEOUT_US, spin_us_);
    next += part;
    left -= part;
  }
}

void ReplyWriter::acknowledge() {
  if (!stream_) return;
  ReplyHeader header = make_reply_header(0, last_number_, frames_received(), ReplyKind::Acknowledge);
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
  try {
    write(&header, sizeof header);
  } catch (const ConnectionLost&) {
    lost_ = true;
    stream_ = nullptr;
  }
}

void ReplyWriter::acknowledge_if_due() {
  bool due = unacknowledged_frames_ >= ACKNOWLEDGE_FRAMES || unacknowledged_bytes_ >= ACKNOWLEDGE_BYTES;
  if (due) acknowledge();
}

void ReplyWriter::send_fatal(const Failure& failure) {
  if (!stream_ || within_reply_) return;
  Writer payload, frame;
  write_error(payload, failure);
  frame.put(make_reply_header(payload.size(), last_number_, frames_received(), ReplyKind::Fatal));
  frame.raw(payload.data(), payload.size());
  try {
    stream_->write_all(frame.data(), frame.size(), FATAL_TIMEOUT_US);
    drain_until_closed(*stream_);
  } catch (const ConnectionLost&) {
    lost_ = true;  // expected: the client closes the connection after this error
  }
  stream_ = nullptr;
}

void ReplyWriter::copy_borrowed(const c10::Storage& storage) {
  for (Reply& reply : unreceived_) {
    if (!reply.borrowed || !reply.tensor.storage().is_alias_of(storage)) continue;
    at::Tensor copy = reply.tensor.to(c10::kCPU, /*non_blocking=*/false, /*copy=*/true);
    if (copy.nbytes() > reply.counted_bytes) count_bytes(reply, copy.nbytes() - reply.counted_bytes);
    reply.tensor = std::move(copy);
    reply.borrowed = false;
    borrowed_--;
  }
}

void ReplyWriter::adopt_borrowed(const c10::Storage& storage, uint64_t bytes) {
  for (Reply& reply : unreceived_) {
    if (!reply.borrowed || reply.adopted || !reply.tensor.storage().is_alias_of(storage)) continue;
    reply.adopted = true;  // still borrowed: a replay may write to it
    count_bytes(reply, bytes);
    bytes = 0;  // several replies may use it; count it once
  }
}

}  // namespace genie
