// What comes from the client over one connection: frame headers, and payloads in memory or straight to where
// they belong. Not for: what they mean (session.h).
#pragma once

#include <cstdint>
#include <vector>

#include "../stream.h"
#include "../wire.h"

namespace genie {

class Inbox {
 public:
  // Looks for bytes for `spin_us` before it lets the thread sleep.
  Inbox(Stream& stream, int64_t spin_us);

  // Whether the next frame has begun within the time; negative: waits for ever. ConnectionLost at the end.
  bool wait(int64_t timeout_us);
  // Takes what has come and does not wait: ConnectionLost when the client has left.
  void look();
  // ConnectionLost when a frame that has begun does not go on. ProtocolError when it is too large.
  FrameHeader read_header();
  // Valid until the next call.
  const uint8_t* read_payload(size_t bytes);
  void read_into(uint8_t* into, size_t bytes);
  void skip(size_t bytes);

 private:
  size_t buffered() const { return end_ - start_; }
  bool receive(int64_t timeout_us);
  void fill(size_t bytes);

  Stream& stream_;
  int64_t spin_us_;
  std::vector<uint8_t> buffer_;
  size_t start_ = 0, end_ = 0;
};

}  // namespace genie
