#include "stream.h"

#include <algorithm>
#include <cerrno>
#include <optional>

#include <poll.h>

#include "stream_socket.h"

namespace genie {

namespace {

class PlaintextStream final : public Stream {
 public:
  explicit PlaintextStream(std::shared_ptr<Socket> socket) : socket_(std::move(socket)) {}

  size_t read_some(void* into, size_t size, int64_t timeout_us) override {
    if (size == 0) return 0;
    Deadline deadline(timeout_us);
    do {
      socket_->check_open();
      ssize_t got = socket_->receive(into, size);
      if (got > 0) return static_cast<size_t>(got);
      if (got == 0) throw ConnectionLost("the peer closed the connection");
      throw_unless_would_block();
    } while (socket_->wait_ready(POLLIN, deadline));
    return 0;
  }

  size_t write_some(const void* from, size_t size) override {
    socket_->check_open();
    ssize_t sent = socket_->send(from, size);
    if (sent >= 0) return static_cast<size_t>(sent);
    throw_unless_would_block();
    return 0;
  }

  bool wait_writable(int64_t timeout_us) override {
    return socket_->wait_ready(POLLOUT, Deadline(timeout_us));
  }

  void shut_down() noexcept override { socket_->shut_down(); }

  bool is_encrypted() const override { return false; }

  std::unique_ptr<Stream> downgrade_to_plaintext(int64_t) override {
    throw std::logic_error("this connection has no TLS to shut down");
  }

 private:
  // After a failed call: returns if it would only have blocked, throws otherwise.
  void throw_unless_would_block() const {
    int error = errno;
    if (would_block(error)) return;
    socket_->check_open();  // a local shutdown is the better reason
    throw ConnectionLost("the connection broke: " + errno_text(error));
  }

  std::shared_ptr<Socket> socket_;
};

}  // namespace

std::unique_ptr<Stream> Stream::plaintext(int fd) { return plaintext_stream(std::make_shared<Socket>(fd)); }

std::unique_ptr<Stream> plaintext_stream(std::shared_ptr<Socket> socket) {
  return std::make_unique<PlaintextStream>(std::move(socket));
}

void Stream::read_exactly(void* into, size_t size, int64_t timeout_us) {
  Deadline deadline(timeout_us);
  auto* next = static_cast<char*>(into);
  for (size_t left = size; left > 0;) {
    size_t got = read_some(next, left, deadline.remaining_us());
    if (got == 0) {
      throw ConnectionLost("timeout: the peer sent " + std::to_string(size - left) + " of " +
                           std::to_string(size) + " bytes");
    }
    next += got;
    left -= got;
  }
}

size_t Stream::read_spinning(void* into, size_t size, int64_t timeout_us, int64_t spin_us) {
  if (timeout_us >= 0) spin_us = std::min(spin_us, timeout_us);
  Deadline spinning(std::max<int64_t>(spin_us, 0));
  do {
    if (size_t got = read_some(into, size, 0)) return got;
  } while (spinning.remaining_us() > 0);
  return timeout_us != 0 ? read_some(into, size, timeout_us) : 0;
}

void Stream::write_all(const void* from, size_t size, int64_t timeout_us, int64_t spin_us) {
  Deadline deadline(timeout_us);
  std::optional<Deadline> spinning;
  auto* next = static_cast<const char*>(from);
  for (size_t left = size; left > 0;) {
    size_t sent = write_some(next, left);
    next += sent;
    left -= sent;
    if (sent > 0) {
      spinning.reset();
      continue;
    }
    if (!spinning) spinning.emplace(spin_us);
    if (spinning->remaining_us() > 0) continue;
    if (!wait_writable(deadline.remaining_us())) {
      throw ConnectionLost("timeout: the peer received " + std::to_string(size - left) + " of " +
                           std::to_string(size) + " bytes");
    }
  }
}

}  // namespace genie
