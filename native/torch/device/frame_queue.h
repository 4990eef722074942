// The frames that are sent to one executor: collects records in frames, and keeps each frame until the
// executor has acknowledged it, to send it again after a connection loss. Not thread-safe: the mutex of the
// connection guards it. Does not use the socket (sending.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "../wire.h"

namespace genie {

constexpr size_t RECORDS_FRAME_TARGET_BYTES = 48u << 10;

class FrameQueue {
 public:
  FrameQueue() { records_.append_uninitialized(sizeof(FrameHeader)); }

  // The records of the next frame.
  WireWriter& records() { return records_; }
  bool has_records() const { return records_.size() > sizeof(FrameHeader); }
  bool has_frame_of_records() const { return records_.size() >= RECORDS_FRAME_TARGET_BYTES; }
  // Returns the number of records in the next frame.
  uint32_t count_record() { return ++record_count_; }
  // `replies_received`: the acknowledgement that the frame carries.
  void queue_records(uint64_t replies_received);
  // A part of an upload. If `is_external`, the caller keeps the payload until the frame is acknowledged, or
  // replace_external_payloads() has succeeded.
  void queue_upload_part(const uint8_t* payload, uint64_t payload_bytes, bool is_external,
                         uint64_t replies_received) {
    queue_frame(FrameKind::Bytes, payload, payload_bytes, is_external, replies_received);
  }

  // The number of the last frame.
  uint64_t created_count() const { return created_count_; }
  // Whether so much is unacknowledged that threads wait before they write records.
  bool is_window_full() const { return is_window_full_; }
  bool has_unacknowledged() const { return !unacknowledged_.empty(); }
  bool is_acknowledged(uint64_t frame_number) const {
    return unacknowledged_.empty() || unacknowledged_.front().number > frame_number;
  }
  // Whether a frame was acknowledged that the sending thread has not marked as sent yet.
  bool is_sending_acknowledged_frame() const {
    return has_unacknowledged() && unacknowledged_.front().number <= acknowledged_number_;
  }
  // The executor has received the frames up to this number.
  void acknowledge(uint64_t frame_number);
  // All frames that the executor has not received are to be sent again, on a new connection.
  void rewind(uint64_t frames_received);
  void clear();

  bool has_unsent() const { return unsent_index_ < unacknowledged_.size(); }
  bool is_sent(uint64_t frame_number) const {
    return !has_unsent() || unacknowledged_[unsent_index_].number > frame_number;
  }
  struct Part {
    const uint8_t* data;
    uint64_t bytes;
  };
  // The next bytes to send, which stay valid until end_write(). Only if has_unsent().
  Part begin_write();
  void end_write() { number_being_written_ = 0; }
  // Returns whether the frame is now sent whole. Called once per begin_write().
  bool add_sent_bytes(uint64_t sent_bytes);
  // Replaces external payloads by zeros, except one that is being written. Returns whether none is left.
  bool replace_external_payloads(uint64_t first_number, uint64_t last_number);

 private:
  struct Frame {
    std::vector<uint8_t> bytes;                 // header and payload, or the header alone
    const uint8_t* external_payload = nullptr;  // owned by a thread that waits in send_upload
    uint64_t external_payload_bytes = 0;
    uint64_t number = 0;
    uint64_t sent_bytes = 0;
    uint64_t size() const { return bytes.size() + external_payload_bytes; }
  };

  void queue_frame(FrameKind kind, const uint8_t* payload, uint64_t payload_bytes, bool is_external,
                   uint64_t replies_received);
  void keep_spare_buffer(std::vector<uint8_t> buffer);
  bool exceeds_window() const {
    return unacknowledged_.size() > UNACKNOWLEDGED_FRAMES_MAX ||
           unacknowledged_bytes_ > UNACKNOWLEDGED_BYTES_MAX;
  }

  WireWriter records_;  // begins with space for a header
  uint32_t record_count_ = 0;
  std::deque<Frame> unacknowledged_;  // those from `unsent_index_` on are not sent whole
  size_t unsent_index_ = 0;
  uint64_t unacknowledged_bytes_ = 0;
  uint64_t acknowledged_number_ = 0;
  uint64_t created_count_ = 0;
  uint64_t number_being_written_ = 0;
  bool is_window_full_ = false;
  std::vector<std::vector<uint8_t>> spare_buffers_, large_spare_buffers_;
};

}  // namespace genie
