#include "reply_writer.h"

#include <algorithm>
#include <chrono>

#include <c10/util/Exception.h>

#include "stream_limits.h"

namespace genie {

namespace {

constexpr int64_t SEND_FATAL_ERROR_TIMEOUT_US = 1'000'000;
// Tensors up to this size are copied into the reply instead of borrowed.
constexpr uint64_t COPIED_REPLY_BYTES_MAX = 1u << 20;
constexpr size_t SPARE_FRAMES_MAX = 4;

ReplyHeader make_reply_header(uint64_t payload_bytes, uint64_t reply_number, uint64_t frames_received,
                              ReplyKind kind) {
  return ReplyHeader{payload_bytes, reply_number, frames_received, kind, 0};
}

// Reads until the client closes the connection: closing it first could drop data that was sent last.
void drain_until_closed(Stream& stream) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(SEND_FATAL_ERROR_TIMEOUT_US);
  std::vector<uint8_t> discarded(64u << 10);
  for (;;) {
    auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return;
    if (stream.read_some(discarded.data(), discarded.size(), left.count()) == 0) return;
  }
}

}  // namespace

void ReplyWriter::begin_connection(Stream& stream, uint64_t replies_received) {
  stream_ = &stream;
  is_connection_lost_ = is_reply_incomplete_ = false;
  release_replies(replies_received);
  for (KeptReply& reply : unreceived_replies_) send(reply);
  unacknowledged_frames_ = 0;  // the handshake reply contained the number
  unacknowledged_bytes_ = 0;
}

void ReplyWriter::count_received_frame(uint64_t frame_number, size_t bytes) {
  frames_received_.store(frame_number, std::memory_order_relaxed);
  unacknowledged_frames_++;
  unacknowledged_bytes_ += bytes;
}

void ReplyWriter::release_replies(uint64_t last_reply_number) {
  if (last_reply_number > newest_reply_number_)
    throw ProtocolError("the client acknowledged replies that were never sent");
  while (!unreceived_replies_.empty() && unreceived_replies_.front().number <= last_reply_number) {
    release_reply(unreceived_replies_.front());
    unreceived_replies_.pop_front();
  }
}

void ReplyWriter::release_reply(KeptReply& reply) {
  storages_.add_reply_bytes(-static_cast<int64_t>(reply.counted_bytes));
  if (reply.borrows_tensor) borrowing_reply_count_--;
  if (spare_frames_.size() < SPARE_FRAMES_MAX) spare_frames_.push_back(std::move(reply.frame));
}

// Reuses memory: page faults would dominate the cost of a new frame.
std::vector<uint8_t> ReplyWriter::new_reply_frame(size_t payload_bytes) {
  std::vector<uint8_t> frame;
  if (!spare_frames_.empty()) {
    frame = std::move(spare_frames_.back());
    spare_frames_.pop_back();
  }
  frame.resize(sizeof(ReplyHeader) + payload_bytes);
  return frame;
}

ReplyWriter::KeptReply& ReplyWriter::add_reply(ReplyKind kind, std::vector<uint8_t> frame) {
  if (unreceived_replies_.size() >= UNRECEIVED_REPLIES_MAX)
    throw ProtocolError("too many replies that the client has not received");
  KeptReply reply;
  reply.number = ++newest_reply_number_;
  reply.kind = kind;
  reply.frame = std::move(frame);
  unreceived_replies_.push_back(std::move(reply));
  count_reply_memory(unreceived_replies_.back(),
                     unreceived_replies_.back().frame.size() - sizeof(ReplyHeader));
  return unreceived_replies_.back();
}

void ReplyWriter::count_reply_memory(KeptReply& reply, uint64_t bytes) {
  reply.counted_bytes += bytes;
  storages_.add_reply_bytes(static_cast<int64_t>(bytes));
}

void ReplyWriter::send_reply(const WireWriter& payload) {
  KeptReply& reply = add_reply(ReplyKind::Reply, new_reply_frame(payload.size()));
  std::copy_n(payload.data(), payload.size(), reply.frame.data() + sizeof(ReplyHeader));
  send(reply);
}

void ReplyWriter::send_error_reply(const Failure& failure) {
  WireWriter payload;
  write_remote_error(payload, failure);
  KeptReply& reply = add_reply(ReplyKind::Error, new_reply_frame(payload.size()));
  std::copy_n(payload.data(), payload.size(), reply.frame.data() + sizeof(ReplyHeader));
  send(reply);
}

void ReplyWriter::send_tensor_reply(at::Tensor contiguous_tensor, bool is_owned) {
  uint64_t bytes = contiguous_tensor.nbytes();
  if (bytes <= COPIED_REPLY_BYTES_MAX) {
    std::vector<uint8_t> frame = new_reply_frame(bytes);  // before add_reply(): reading may fail
    staging_.copy_to_host(contiguous_tensor, frame.data() + sizeof(ReplyHeader));
    send(add_reply(ReplyKind::Reply, std::move(frame)));
    return;
  }
  KeptReply& reply = add_reply(ReplyKind::Reply, new_reply_frame(0));
  reply.tensor = std::move(contiguous_tensor);
  reply.borrows_tensor = !is_owned;
  if (reply.borrows_tensor) {
    borrowing_reply_count_++;
  } else {
    count_reply_memory(reply, bytes);
  }
  send(reply);
}

void ReplyWriter::send(KeptReply& reply) {
  if (!stream_) return;
  is_reply_incomplete_ = true;
  try {
    send_header(reply);
    if (reply.tensor.defined()) {
      staging_.for_each_chunk(reply.tensor,
                              [this](const uint8_t* from, size_t bytes) { write_to_stream(from, bytes); });
    }
  } catch (const ConnectionLost&) {
    is_connection_lost_ = true;
    stream_ = nullptr;
    return;
  } catch (const c10::Error& error) {
    throw AcceleratorFailed(
        error.what_without_backtrace());  // the reply is incomplete: the session cannot continue
  }
  is_reply_incomplete_ = false;
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
}

void ReplyWriter::send_header(KeptReply& reply) {
  uint64_t payload = reply.frame.size() - sizeof(ReplyHeader);
  if (reply.tensor.defined()) payload = reply.tensor.nbytes();
  ReplyHeader header = make_reply_header(payload, reply.number, frames_received(), reply.kind);
  std::memcpy(reply.frame.data(), &header, sizeof header);
  write_to_stream(reply.frame.data(), reply.frame.size());
}

void ReplyWriter::write_to_stream(const void* data, size_t bytes) {
  const auto* next = static_cast<const uint8_t*>(data);
  for (size_t left = bytes; left > 0;) {
    size_t part = std::min(left, WRITE_CHUNK_BYTES);
    stream_->write_all(next, part, STALL_TIMEOUT_US, spin_us_);
    next += part;
    left -= part;
  }
}

void ReplyWriter::acknowledge_frames() {
  if (!stream_) return;
  ReplyHeader header = make_reply_header(0, newest_reply_number_, frames_received(), ReplyKind::Acknowledge);
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
  try {
    write_to_stream(&header, sizeof header);
  } catch (const ConnectionLost&) {
    is_connection_lost_ = true;
    stream_ = nullptr;
  }
}

void ReplyWriter::acknowledge_frames_if_due() {
  bool due = unacknowledged_frames_ >= ACKNOWLEDGE_INTERVAL_FRAMES ||
             unacknowledged_bytes_ >= ACKNOWLEDGE_INTERVAL_BYTES;
  if (due) acknowledge_frames();
}

void ReplyWriter::send_fatal_error(const Failure& failure) {
  if (!stream_ || is_reply_incomplete_) return;
  WireWriter payload, frame;
  write_remote_error(payload, failure);
  frame.append_value(
      make_reply_header(payload.size(), newest_reply_number_, frames_received(), ReplyKind::Fatal));
  frame.append_bytes(payload.data(), payload.size());
  try {
    stream_->write_all(frame.data(), frame.size(), SEND_FATAL_ERROR_TIMEOUT_US);
    drain_until_closed(*stream_);
  } catch (const ConnectionLost&) {
    is_connection_lost_ = true;  // expected: the client closes the connection after this error
  }
  stream_ = nullptr;
}

void ReplyWriter::copy_replies_borrowing(const c10::Storage& storage) {
  for (KeptReply& reply : unreceived_replies_) {
    if (!reply.borrows_tensor || !reply.tensor.storage().is_alias_of(storage)) continue;
    at::Tensor copy = reply.tensor.to(c10::kCPU, /*non_blocking=*/false, /*copy=*/true);
    if (copy.nbytes() > reply.counted_bytes) count_reply_memory(reply, copy.nbytes() - reply.counted_bytes);
    reply.tensor = std::move(copy);
    reply.borrows_tensor = false;
    borrowing_reply_count_--;
  }
}

void ReplyWriter::keep_storage_for_replies(const c10::Storage& storage, uint64_t bytes) {
  for (KeptReply& reply : unreceived_replies_) {
    if (!reply.borrows_tensor || reply.is_storage_freed || !reply.tensor.storage().is_alias_of(storage))
      continue;
    reply.is_storage_freed = true;  // still borrowed: a replay may write to it
    count_reply_memory(reply, bytes);
    bytes = 0;  // several replies may use it; count it once
  }
}

}  // namespace genie
