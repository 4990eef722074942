// One connection between a client and an executor: bytes in, bytes out, over TLS or, within one machine,
// bare.
//
// Not for: what the bytes mean (wire.h), and when to connect again (the two ends).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace genie {

// The connection has ended or cannot be used; what() says how.
struct ConnectionLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The peer is not who it should be, or no TLS could be made; connecting again is no use.
struct TlsRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One thread may read while another writes; shut_down() may come from any. Times are in microseconds from
// the call; a negative one waits for ever. The file descriptor is taken over by whoever is given it, also
// when that fails, and closed with the object.
class Stream {
 public:
  virtual ~Stream() = default;

  static std::unique_ptr<Stream> bare(int fd);
  // The handshake is done when these return. TlsRefused when it fails; ConnectionLost when the peer leaves or
  // the time is over. Without `ca_der` or a name a client does not connect: there is no way to trust whoever
  // answers. Only TLS 1.3, only these CAs.
  static std::unique_ptr<Stream> tls_client(int fd, const std::vector<std::string>& ca_der,
                                            const std::string& server_name, int64_t timeout_us);
  static std::unique_ptr<Stream> tls_server(int fd, const std::string& certificate_path,
                                            const std::string& key_path, int64_t timeout_us);

  // At least one byte and at most `size`; 0 when nothing came in time. ConnectionLost at the end.
  virtual size_t read_some(void* into, size_t size, int64_t timeout_us) = 0;
  // What fits without waiting, perhaps 0. The next call must go on where this one stopped, and offer at least
  // as much: TLS may have made a record of it already.
  virtual size_t write_some(const void* from, size_t size) = 0;
  // Whether write_some has room within the time.
  virtual bool wait_writable(int64_t timeout_us) = 0;
  // Wakes whoever reads or writes; they see ConnectionLost.
  virtual void shut_down() noexcept = 0;
  virtual bool encrypted() const = 0;

  // Ends TLS on both sides and gives the same connection back without it; this object then only throws
  // ConnectionLost. Both ends must call this at the same point of what they say, and nothing that follows is
  // lost. Only for two processes of one machine (opwire.py decides that); std::logic_error on a bare stream.
  virtual std::unique_ptr<Stream> without_tls(int64_t timeout_us) = 0;

  // As read_some, but looks again and again for `spin_us` before it sleeps: waking up takes longer than most
  // waits between two processes that are both at it.
  size_t read_soon(void* into, size_t size, int64_t timeout_us, int64_t spin_us);
  // ConnectionLost when the time is over, too: a peer that stops in the middle is gone.
  void read_exactly(void* into, size_t size, int64_t timeout_us);
  void write_all(const void* from, size_t size, int64_t timeout_us, int64_t spin_us = 0);
};

}  // namespace genie
