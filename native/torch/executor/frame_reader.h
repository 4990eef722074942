// Reads the client's frames from one connection: headers, and payloads into a buffer or directly to their
// destination. session.h interprets them.
#pragma once

#include <cstdint>
#include <vector>

#include "../stream.h"
#include "../wire.h"

namespace genie {

class FrameReader {
 public:
  // Polls the socket for `spin_us` before it blocks.
  FrameReader(Stream& stream, int64_t spin_us);

  // Whether the next frame has started within the timeout; negative: no timeout. ConnectionLost at the end.
  bool wait_for_frame(int64_t timeout_us);
  // Buffers available bytes without waiting. ConnectionLost if the client has disconnected.
  void receive_available();
  // ConnectionLost if a frame that has started stalls. ProtocolError if it is too large.
  FrameHeader read_header();
  // Valid until the next call.
  const uint8_t* read_payload(size_t bytes);
  void read_payload_into(uint8_t* into, size_t bytes);
  void skip_payload(size_t bytes);

 private:
  size_t buffered_bytes() const { return unread_end_ - unread_start_; }
  bool receive_some(int64_t timeout_us);
  void buffer_at_least(size_t bytes);

  Stream& stream_;
  int64_t spin_us_;
  std::vector<uint8_t> buffer_;
  size_t unread_start_ = 0, unread_end_ = 0;
};

}  // namespace genie
