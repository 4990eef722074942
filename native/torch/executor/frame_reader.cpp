#include "frame_reader.h"

#include <algorithm>
#include <cstring>

#include "limits.h"

namespace genie {

namespace {

constexpr size_t FRAME_BUFFER_BYTES = 256u << 10;

}  // namespace

FrameReader::FrameReader(Stream& stream, int64_t spin_us)
    : stream_(stream), spin_us_(spin_us), buffer_(FRAME_BUFFER_BYTES) {}

bool FrameReader::wait(int64_t timeout_us) {
  if (buffered() > 0) return true;
  return receive(timeout_us);
}

void FrameReader::poll() { receive(0); }

FrameHeader FrameReader::read_header() {
  fill(sizeof(FrameHeader));
  FrameHeader header;
  std::memcpy(&header, buffer_.data() + start_, sizeof header);
  start_ += sizeof header;
  if (header.bytes > FRAME_BYTES_MAX) {
    throw ProtocolError("a frame has " + std::to_string(header.bytes) + " bytes; the maximum is " +
                        std::to_string(FRAME_BYTES_MAX));
  }
  return header;
}

const uint8_t* FrameReader::read_payload(size_t bytes) {
  fill(bytes);
  const uint8_t* payload = buffer_.data() + start_;
  start_ += bytes;
  return payload;
}

void FrameReader::read_into(uint8_t* into, size_t bytes) {
  size_t here = std::min(bytes, buffered());
  std::memcpy(into, buffer_.data() + start_, here);
  start_ += here;
  while (here < bytes) {
    size_t got = stream_.read_spinning(into + here, bytes - here, STALL_TIMEOUT_US, spin_us_);
    if (got == 0) throw ConnectionLost("the client stalled in the middle of a frame");
    here += got;
  }
}

void FrameReader::skip(size_t bytes) {
  while (bytes > 0) {
    size_t part = std::min(bytes, FRAME_BUFFER_BYTES);
    read_payload(part);
    bytes -= part;
  }
}

bool FrameReader::receive(int64_t timeout_us) {
  if (start_ == end_) start_ = end_ = 0;
  size_t got = stream_.read_spinning(buffer_.data() + end_, buffer_.size() - end_, timeout_us, spin_us_);
  end_ += got;
  return got > 0;
}

// Waits until `bytes` contiguous bytes are buffered.
void FrameReader::fill(size_t bytes) {
  if (buffered() >= bytes) return;
  if (buffer_.size() - start_ < bytes) {
    std::memmove(buffer_.data(), buffer_.data() + start_, buffered());
    end_ -= start_;
    start_ = 0;
    if (buffer_.size() < bytes) buffer_.resize(bytes);
  }
  while (buffered() < bytes) {
    if (!receive(STALL_TIMEOUT_US)) throw ConnectionLost("the client stalled in the middle of a frame");
  }
}

}  // namespace genie
