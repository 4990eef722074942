#include "stream_socket.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "stream.h"

namespace genie {

namespace {

constexpr int KEEPALIVE_IDLE_S = 30;
constexpr int KEEPALIVE_INTERVAL_S = 10;
constexpr int KEEPALIVE_PROBES = 3;
// One year, so that adding timeouts does not overflow.
constexpr int64_t TIMEOUT_US_MAX = 31'536'000'000'000;

#ifdef MSG_NOSIGNAL
constexpr int SEND_FLAGS = MSG_NOSIGNAL;
#else
constexpr int SEND_FLAGS = 0;
#endif

void set_socket_option(int fd, int level, int name, int value) {
  // Optional: Unix sockets, which tests use, lack the TCP options.
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

// No Nagle delay. Keepalive detects a vanished peer within about a minute, unless data is in flight: the
// kernel then retransmits for much longer, and the cluster reports the loss first. Buffer sizes are left to
// the kernel's autotuning.
void set_tcp_options(int fd) {
  set_socket_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_socket_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_KEEPIDLE
  set_socket_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S);
#endif
  set_socket_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S);
  set_socket_option(fd, IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_PROBES);
#ifdef SO_NOSIGPIPE
  set_socket_option(fd, SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
}

bool is_connected_socket(int fd) {
  int type = 0;
  socklen_t size = sizeof(type);
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

// poll, with microsecond resolution on Linux; a negative timeout waits forever.
int poll_descriptor(pollfd* entry, int64_t timeout_us) {
#ifdef __linux__
  timespec left{static_cast<time_t>(timeout_us / 1000000), static_cast<long>(timeout_us % 1000000 * 1000)};
  return ::ppoll(entry, 1, timeout_us < 0 ? nullptr : &left, nullptr);
#else
  int64_t left_ms = std::min<int64_t>((timeout_us + 999) / 1000, INT_MAX);
  return ::poll(entry, 1, timeout_us < 0 ? -1 : static_cast<int>(left_ms));
#endif
}

}  // namespace

Deadline::Deadline(int64_t timeout_us)
    : is_infinite_(timeout_us < 0), end_(std::chrono::steady_clock::now()) {
  end_ += std::chrono::microseconds(std::min(timeout_us, TIMEOUT_US_MAX));
}

int64_t Deadline::remaining_us() const {
  if (is_infinite_) return -1;
  auto left = std::chrono::duration_cast<std::chrono::microseconds>(end_ - std::chrono::steady_clock::now());
  return std::max<int64_t>(left.count(), 0);
}

Socket::Socket(int fd) : fd_(fd) {
  int flags = ::fcntl(fd, F_GETFL);
  if (flags == -1 || !is_connected_socket(fd) || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == -1) {
    if (flags != -1) ::close(fd);
    throw ConnectionLost("descriptor " + std::to_string(fd) + " is not a connected socket");
  }
  set_tcp_options(fd);
}

Socket::~Socket() { ::close(fd_); }

ssize_t Socket::receive(void* into, size_t size) noexcept {
  ssize_t got;
  do {
    got = ::recv(fd_, into, size, 0);
  } while (got == -1 && errno == EINTR);
  return got;
}

ssize_t Socket::send(const void* from, size_t size) noexcept {
  ssize_t sent;
  do {
    sent = ::send(fd_, from, size, SEND_FLAGS);
  } while (sent == -1 && errno == EINTR);
  return sent;
}

bool Socket::wait_ready(short events, const Deadline& deadline) {
  for (;;) {
    pollfd entry{fd_, events, 0};
    int64_t remaining_us = deadline.remaining_us();
    int ready = poll_descriptor(&entry, remaining_us);
    if (ready > 0) return true;
    if (ready == -1 && errno != EINTR) throw ConnectionLost("waiting failed: " + errno_text(errno));
    if (remaining_us == 0) return false;
  }
}

void Socket::shut_down() noexcept {
  is_shut_down_.store(true, std::memory_order_release);
  // ENOTCONN if the peer disconnected first, which has woken the waiters.
  (void)::shutdown(fd_, SHUT_RDWR);
}

void Socket::check_open() const {
  if (is_shut_down_.load(std::memory_order_acquire))
    throw ConnectionLost("the connection was closed locally");
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace genie
