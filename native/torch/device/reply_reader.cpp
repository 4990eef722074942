// See reply_reader.h.
#include "reply_reader.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace genie {

namespace {

constexpr size_t READ_BUFFER_BYTES = 64u << 10;
// Busy-waits like CUDA, for a limited time, on machines with enough cores.
constexpr int64_t REPLY_SPIN_US = 10'000;
constexpr unsigned REPLY_SPIN_CORES_MIN = 4;

}  // namespace

int64_t reply_spin_duration_us() {
  static const int64_t found =
      std::thread::hardware_concurrency() >= REPLY_SPIN_CORES_MIN ? REPLY_SPIN_US : 0;
  return found;
}

ReplyReader::ReplyReader() : buffer_(READ_BUFFER_BYTES) { restart(); }

void ReplyReader::restart() {
  is_in_reply_ = false;
  payload_.clear();
  buffer_start_ = buffer_end_ = 0;
  last_received_at_ = std::chrono::steady_clock::now();
}

bool ReplyReader::fill_buffer(Stream& stream, size_t needed_bytes, int64_t timeout_us) {
  while (buffered_bytes() < needed_bytes) {
    if (buffer_start_ == buffer_end_) buffer_start_ = buffer_end_ = 0;
    if (buffer_.size() - buffer_start_ < needed_bytes) {
      std::memmove(buffer_.data(), buffer_.data() + buffer_start_, buffered_bytes());
      buffer_end_ -= buffer_start_;
      buffer_start_ = 0;
    }
    size_t got = stream.read_spinning(buffer_.data() + buffer_end_, buffer_.size() - buffer_end_, timeout_us,
                                      reply_spin_duration_us());
    if (got == 0) return false;
    buffer_end_ += got;
    last_received_at_ = std::chrono::steady_clock::now();
  }
  return true;
}

bool ReplyReader::read_header(Stream& stream, int64_t timeout_us) {
  if (!fill_buffer(stream, sizeof(ReplyHeader), timeout_us)) return false;
  std::memcpy(&header_, buffer_.data() + buffer_start_, sizeof header_);
  buffer_start_ += sizeof header_;
  return true;
}

void ReplyReader::begin_payload(bool goes_to_caller) {
  is_in_reply_ = true;
  received_bytes_ = 0;
  goes_to_caller_ = goes_to_caller;
  payload_.resize(goes_to_caller ? 0 : header_.bytes);
}

bool ReplyReader::read_payload_part(Stream& stream, int64_t timeout_us, uint8_t* destination) {
  uint8_t* target = goes_to_caller_ ? destination : payload_.data();
  uint64_t left = header_.bytes - received_bytes_;
  size_t buffered = std::min<size_t>(left, buffered_bytes());
  if (buffered > 0) {
    if (target) std::memcpy(target + received_bytes_, buffer_.data() + buffer_start_, buffered);
    buffer_start_ += buffered;
    received_bytes_ += buffered;
    return true;
  }
  size_t got =
      target ? stream.read_spinning(target + received_bytes_, left, timeout_us, reply_spin_duration_us())
             : stream.read_some(buffer_.data(), std::min<size_t>(left, buffer_.size()),
                                timeout_us);  // discarded; the buffer is empty
  received_bytes_ += got;
  if (got) last_received_at_ = std::chrono::steady_clock::now();
  return got > 0;
}

std::vector<uint8_t> ReplyReader::take_payload() {
  is_in_reply_ = false;
  return std::exchange(payload_, {});
}

}  // namespace genie
