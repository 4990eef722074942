#include "inbox.h"

#include <algorithm>
#include <cstring>

namespace genie {

namespace {

constexpr size_t BUFFER_BYTES = 256u << 10;
// For a frame that has begun. Between frames a client may think as long as it likes.
constexpr int64_t STALLED_US = 60'000'000;

}  // namespace

Inbox::Inbox(Stream& stream, int64_t spin_us) : stream_(stream), spin_us_(spin_us), buffer_(BUFFER_BYTES) {}

bool Inbox::wait(int64_t timeout_us) {
  if (buffered() > 0) return true;
  return receive(timeout_us);
}

void Inbox::look() { receive(0); }

FrameHeader Inbox::read_header() {
  fill(sizeof(FrameHeader));
  FrameHeader header;
  std::memcpy(&header, buffer_.data() + start_, sizeof header);
  start_ += sizeof header;
  if (header.bytes > FRAME_BYTES_MAX) {
    throw ProtocolError("a frame of " + std::to_string(header.bytes) + " bytes came; the most is " +
                        std::to_string(FRAME_BYTES_MAX));
  }
  return header;
}

const uint8_t* Inbox::read_payload(size_t bytes) {
  fill(bytes);
  const uint8_t* payload = buffer_.data() + start_;
  start_ += bytes;
  return payload;
}

void Inbox::read_into(uint8_t* into, size_t bytes) {
  size_t here = std::min(bytes, buffered());
  std::memcpy(into, buffer_.data() + start_, here);
  start_ += here;
  while (here < bytes) {
    size_t got = stream_.read_soon(into + here, bytes - here, STALLED_US, spin_us_);
    if (got == 0) throw ConnectionLost("the client stopped in the middle of a frame");
    here += got;
  }
}

void Inbox::skip(size_t bytes) {
  while (bytes > 0) {
    size_t part = std::min(bytes, BUFFER_BYTES);
    read_payload(part);
    bytes -= part;
  }
}

bool Inbox::receive(int64_t timeout_us) {
  if (start_ == end_) start_ = end_ = 0;
  size_t got = stream_.read_soon(buffer_.data() + end_, buffer_.size() - end_, timeout_us, spin_us_);
  end_ += got;
  return got > 0;
}

// So many bytes are there, one after the other.
void Inbox::fill(size_t bytes) {
  if (buffered() >= bytes) return;
  if (buffer_.size() - start_ < bytes) {
    std::memmove(buffer_.data(), buffer_.data() + start_, buffered());
    end_ -= start_;
    start_ = 0;
    if (buffer_.size() < bytes) buffer_.resize(bytes);
  }
  while (buffered() < bytes) {
    if (!receive(STALLED_US)) throw ConnectionLost("the client stopped in the middle of a frame");
  }
}

}  // namespace genie
