// Reads replies from the stream of a connection, in parts: a reply that has arrived partially is kept, and
// the next call continues with it. The read mutex of the connection guards it. Does not know who waits for a
// reply (reply_table.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "../stream.h"
#include "../wire.h"

namespace genie {

// How long a thread polls the socket before it sleeps.
int64_t reply_spin_duration_us();

class ReplyReader {
 public:
  ReplyReader();

  // Continues on a new stream; an incomplete reply is discarded.
  void restart();
  // When bytes arrived last, or restart() was called. Thread-safe.
  std::chrono::steady_clock::time_point last_received_at() const { return last_received_at_; }
  bool has_buffered_header() const { return buffered_bytes() >= sizeof(ReplyHeader); }

  // Whether the header of the current reply has arrived.
  bool is_in_reply() const { return is_in_reply_; }
  const ReplyHeader& header() const { return header_; }
  // Reads the next header; false on timeout.
  bool read_header(Stream& stream, int64_t timeout_us);
  // `goes_to_caller`: each part is written to memory of the caller of read_payload_part().
  void begin_payload(bool goes_to_caller);
  bool goes_to_caller() const { return goes_to_caller_; }
  bool has_whole_payload() const { return received_bytes_ == header_.bytes; }
  // Reads a part; false on timeout. `destination`: memory for the whole payload if goes_to_caller(); null if
  // the payload is not needed any more.
  bool read_payload_part(Stream& stream, int64_t timeout_us, uint8_t* destination);
  // Ends the current reply. The payload is empty if it went to the caller.
  std::vector<uint8_t> take_payload();

 private:
  size_t buffered_bytes() const { return buffer_end_ - buffer_start_; }
  bool fill_buffer(Stream& stream, size_t needed_bytes, int64_t timeout_us);

  ReplyHeader header_{};
  uint64_t received_bytes_ = 0;  // of the payload
  bool goes_to_caller_ = false;
  bool is_in_reply_ = false;
  std::vector<uint8_t> payload_;
  std::vector<uint8_t> buffer_;
  size_t buffer_start_ = 0, buffer_end_ = 0;
  std::atomic<std::chrono::steady_clock::time_point> last_received_at_;
};

}  // namespace genie
