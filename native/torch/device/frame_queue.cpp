// See frame_queue.h.
#include "frame_queue.h"

#include <algorithm>

namespace genie {

namespace {

// Reused buffers have their pages mapped; page faults take longer than the copy.
constexpr size_t SPARE_FRAME_BUFFER_BYTES_MAX = 2 * RECORDS_FRAME_TARGET_BYTES;
constexpr size_t SPARE_FRAME_BUFFERS_MAX = 64;
constexpr size_t LARGE_SPARE_FRAME_BUFFERS_MAX = 4;

}  // namespace

void FrameQueue::queue_records(uint64_t replies_received) {
  if (!has_records()) return;
  queue_frame(FrameKind::Records, records_.data() + sizeof(FrameHeader),
              records_.size() - sizeof(FrameHeader), false, replies_received);
  records_.clear();
  records_.append_uninitialized(sizeof(FrameHeader));
  record_count_ = 0;
}

void FrameQueue::queue_frame(FrameKind kind, const uint8_t* payload, uint64_t payload_bytes, bool is_external,
                             uint64_t replies_received) {
  Frame frame;
  auto& spares =
      payload_bytes > SPARE_FRAME_BUFFER_BYTES_MAX && !is_external ? large_spare_buffers_ : spare_buffers_;
  if (!spares.empty()) {
    frame.bytes = std::move(spares.back());
    spares.pop_back();
  }
  frame.number = ++created_count_;
  FrameHeader header{static_cast<uint32_t>(payload_bytes), kind, frame.number, replies_received};
  const auto* start = reinterpret_cast<const uint8_t*>(&header);
  frame.bytes.assign(start, start + sizeof header);
  if (is_external) {
    frame.external_payload = payload;
    frame.external_payload_bytes = payload_bytes;
  } else {
    frame.bytes.insert(frame.bytes.end(), payload, payload + payload_bytes);
  }
  unacknowledged_bytes_ += frame.bytes.size();
  unacknowledged_.push_back(std::move(frame));
  is_window_full_ = exceeds_window();
}

// --- sending ------------------------------------------------------------------------------------

// The frame stays in place during the write: only sent frames are dropped.
FrameQueue::Part FrameQueue::begin_write() {
  const Frame& frame = unacknowledged_[unsent_index_];
  number_being_written_ = frame.number;
  size_t inside = frame.bytes.size();
  if (frame.sent_bytes < inside) return {frame.bytes.data() + frame.sent_bytes, inside - frame.sent_bytes};
  return {frame.external_payload + (frame.sent_bytes - inside), frame.size() - frame.sent_bytes};
}

bool FrameQueue::add_sent_bytes(uint64_t sent_bytes) {
  Frame& frame = unacknowledged_[unsent_index_];
  frame.sent_bytes += sent_bytes;
  if (frame.sent_bytes < frame.size()) return false;
  unsent_index_++;
  acknowledge(acknowledged_number_);  // the acknowledgement may have come first
  return true;
}

bool FrameQueue::replace_external_payloads(uint64_t first_number, uint64_t last_number) {
  static const auto* zeros = new std::vector<uint8_t>(FRAME_BYTES_MAX);
  bool all = true;
  for (Frame& frame : unacknowledged_) {
    if (!frame.external_payload || frame.number < first_number || frame.number > last_number) continue;
    if (frame.number != number_being_written_) frame.external_payload = zeros->data();
    all &= frame.external_payload == zeros->data();
  }
  return all;
}

// --- acknowledgements ---------------------------------------------------------------------------

void FrameQueue::acknowledge(uint64_t frame_number) {
  acknowledged_number_ = std::max(acknowledged_number_, frame_number);
  while (!unacknowledged_.empty() && unsent_index_ > 0 && unacknowledged_.front().number <= frame_number) {
    unacknowledged_bytes_ -= unacknowledged_.front().bytes.size();
    keep_spare_buffer(std::move(unacknowledged_.front().bytes));
    unacknowledged_.pop_front();
    unsent_index_--;
  }
  if (is_window_full_) is_window_full_ = exceeds_window();
}

void FrameQueue::keep_spare_buffer(std::vector<uint8_t> buffer) {
  bool is_large = buffer.capacity() > SPARE_FRAME_BUFFER_BYTES_MAX;
  auto& spares = is_large ? large_spare_buffers_ : spare_buffers_;
  if (spares.size() < (is_large ? LARGE_SPARE_FRAME_BUFFERS_MAX : SPARE_FRAME_BUFFERS_MAX))
    spares.push_back(std::move(buffer));
}

void FrameQueue::rewind(uint64_t frames_received) {
  unsent_index_ = unacknowledged_.size();
  acknowledge(frames_received);
  for (Frame& frame : unacknowledged_) frame.sent_bytes = 0;
  unsent_index_ = 0;
}

void FrameQueue::clear() {
  unacknowledged_.clear();
  unsent_index_ = 0;
  spare_buffers_.clear();
  large_spare_buffers_.clear();
}

}  // namespace genie
