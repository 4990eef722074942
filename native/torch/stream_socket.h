// A connected socket that never blocks in a call, and the time until which one may wait for it.
//
// Not for: other files than stream*.cpp; everyone else uses stream.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <sys/types.h>

namespace genie {

// `timeout_us` from now; a negative one never comes.
class Deadline {
 public:
  explicit Deadline(int64_t timeout_us);
  // Negative: for ever. 0: the time is over.
  int64_t left_us() const;

 private:
  bool never_;
  std::chrono::steady_clock::time_point end_;
};

class Socket {
 public:
  // Takes the descriptor over, also when it throws: ConnectionLost for one that is not a socket.
  explicit Socket(int fd);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // As recv and send of a socket that does not block: -1 and errno when nothing can be done now, or for good.
  // No SIGPIPE, whatever the process does with it.
  ssize_t receive(void* into, size_t size) noexcept;
  ssize_t send(const void* from, size_t size) noexcept;

  // Until one of poll's `events`, or the end of the connection; false when the time is over first.
  bool wait(short events, const Deadline& deadline);

  // Wakes whoever waits. Any thread.
  void shut_down() noexcept;
  // ConnectionLost once this side has shut it down.
  void check_open() const;

 private:
  int fd_;
  std::atomic<bool> shut_down_{false};
};

class Stream;
std::unique_ptr<Stream> bare_stream(std::shared_ptr<Socket> socket);

// Whether errno of receive() or send() means: wait, then try again.
bool would_block(int error);

std::string error_text(int error);

}  // namespace genie
