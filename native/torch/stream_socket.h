// A connected non-blocking socket, and deadlines.
//
// Private to stream*.cpp; other code uses stream.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <sys/types.h>

namespace genie {

// `timeout_us` from now; a negative timeout never expires.
class Deadline {
 public:
  explicit Deadline(int64_t timeout_us);
  // Negative: no deadline. 0: expired.
  int64_t remaining_us() const;

 private:
  bool is_infinite_;
  std::chrono::steady_clock::time_point end_;
};

class Socket {
 public:
  // Owns the descriptor, also when it throws: ConnectionLost if it is not a socket.
  explicit Socket(int fd);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // As recv and send of a non-blocking socket: -1 and errno on failure. Never raises SIGPIPE.
  ssize_t receive(void* into, size_t size) noexcept;
  ssize_t send(const void* from, size_t size) noexcept;

  // Waits for one of poll's `events`, or the end of the connection; false on timeout.
  bool wait_ready(short events, const Deadline& deadline);

  // Wakes waiting threads. Thread-safe.
  void shut_down() noexcept;
  // ConnectionLost after a local shut_down().
  void check_open() const;

 private:
  int fd_;
  std::atomic<bool> is_shut_down_{false};
};

class Stream;
std::unique_ptr<Stream> plaintext_stream(std::shared_ptr<Socket> socket);

// Whether errno of receive() or send() means that the call would block.
bool would_block(int error);

std::string errno_text(int error);

}  // namespace genie
