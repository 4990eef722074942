// A byte stream between a client and an executor: over TLS or, within one machine, unencrypted.
//
// Does not interpret the bytes (wire.h), and does not reconnect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace genie {

// The connection has ended or is unusable; what() gives the reason.
struct ConnectionLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The TLS handshake failed: the peer's certificate is not trusted, or there is no common TLS version. Not
// retryable.
struct TlsHandshakeFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One thread may read while another writes; shut_down() may be called from any thread. Timeouts are in
// microseconds; a negative timeout waits forever. A factory owns the file descriptor that it is passed, also
// when it throws; the descriptor is closed with the object.
class Stream {
 public:
  virtual ~Stream() = default;

  static std::unique_ptr<Stream> plaintext(int fd);
  // These complete the handshake. TlsHandshakeFailed when it fails; ConnectionLost when the peer disconnects
  // or the timeout expires. A client needs `ca_der` and a server name, because it could not verify the peer
  // otherwise. TLS 1.3 only; only these CAs are trusted.
  static std::unique_ptr<Stream> tls_client(int fd, const std::vector<std::string>& ca_der,
                                            const std::string& server_name, int64_t timeout_us);
  static std::unique_ptr<Stream> tls_server(int fd, const std::string& certificate_path,
                                            const std::string& key_path, int64_t timeout_us);

  // Reads at least one byte and at most `size`; returns 0 on timeout. ConnectionLost at the end of the
  // stream.
  virtual size_t read_some(void* into, size_t size, int64_t timeout_us) = 0;
  // Writes what fits without blocking, possibly nothing, and returns the count. The next call must continue
  // there with at least as many bytes: TLS may have put them in a record already.
  virtual size_t write_some(const void* from, size_t size) = 0;
  // Whether write_some can write within the timeout.
  virtual bool wait_writable(int64_t timeout_us) = 0;
  // Wakes blocked readers and writers; they throw ConnectionLost.
  virtual void shut_down() noexcept = 0;
  virtual bool is_encrypted() const = 0;

  // Shuts TLS down on both sides and returns the same connection as a plaintext stream; this object then only
  // throws ConnectionLost. Both ends must call this at the same point of the protocol; no bytes are lost.
  // Only for two processes on one machine (device_protocol.py decides that); std::logic_error on a plaintext
  // stream.
  virtual std::unique_ptr<Stream> downgrade_to_plaintext(int64_t timeout_us) = 0;

  // As read_some, but polls for `spin_us` before it sleeps: a wake-up takes longer than most waits between
  // two busy processes.
  size_t read_spinning(void* into, size_t size, int64_t timeout_us, int64_t spin_us);
  // These throw ConnectionLost on timeout as well: a peer that stops in the middle counts as lost.
  void read_exactly(void* into, size_t size, int64_t timeout_us);
  void write_all(const void* from, size_t size, int64_t timeout_us, int64_t spin_us = 0);
};

}  // namespace genie
