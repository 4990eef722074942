#include "frame_reader.h"

#include <algorithm>
#include <cstring>

#include "stream_limits.h"

namespace genie {

namespace {

constexpr size_t FRAME_BUFFER_BYTES = 256u << 10;

}  // namespace

FrameReader::FrameReader(Stream& stream, int64_t spin_us)
    : stream_(stream), spin_us_(spin_us), buffer_(FRAME_BUFFER_BYTES) {}

bool FrameReader::wait_for_frame(int64_t timeout_us) {
  if (buffered_bytes() > 0) return true;
  return receive_some(timeout_us);
}

void FrameReader::receive_available() { receive_some(0); }

FrameHeader FrameReader::read_header() {
  buffer_at_least(sizeof(FrameHeader));
  FrameHeader header;
  std::memcpy(&header, buffer_.data() + unread_start_, sizeof header);
  unread_start_ += sizeof header;
  if (header.bytes > FRAME_BYTES_MAX) {
    throw ProtocolError("a frame has " + std::to_string(header.bytes) + " bytes; the maximum is " +
                        std::to_string(FRAME_BYTES_MAX));
  }
  return header;
}

const uint8_t* FrameReader::read_payload(size_t bytes) {
  buffer_at_least(bytes);
  const uint8_t* payload = buffer_.data() + unread_start_;
  unread_start_ += bytes;
  return payload;
}

void FrameReader::read_payload_into(uint8_t* into, size_t bytes) {
  size_t here = std::min(bytes, buffered_bytes());
  std::memcpy(into, buffer_.data() + unread_start_, here);
  unread_start_ += here;
  while (here < bytes) {
    size_t got = stream_.read_spinning(into + here, bytes - here, STALL_TIMEOUT_US, spin_us_);
    if (got == 0) throw ConnectionLost("the client stalled in the middle of a frame");
    here += got;
  }
}

void FrameReader::skip_payload(size_t bytes) {
  while (bytes > 0) {
    size_t part = std::min(bytes, FRAME_BUFFER_BYTES);
    read_payload(part);
    bytes -= part;
  }
}

bool FrameReader::receive_some(int64_t timeout_us) {
  if (unread_start_ == unread_end_) unread_start_ = unread_end_ = 0;
  size_t got =
      stream_.read_spinning(buffer_.data() + unread_end_, buffer_.size() - unread_end_, timeout_us, spin_us_);
  unread_end_ += got;
  return got > 0;
}

// Waits until `bytes` contiguous bytes are buffered.
void FrameReader::buffer_at_least(size_t bytes) {
  if (buffered_bytes() >= bytes) return;
  if (buffer_.size() - unread_start_ < bytes) {
    std::memmove(buffer_.data(), buffer_.data() + unread_start_, buffered_bytes());
    unread_end_ -= unread_start_;
    unread_start_ = 0;
    if (buffer_.size() < bytes) buffer_.resize(bytes);
  }
  while (buffered_bytes() < bytes) {
    if (!receive_some(STALL_TIMEOUT_US)) throw ConnectionLost("the client stalled in the middle of a frame");
  }
}

}  // namespace genie
