#include <algorithm>
#include <cerrno>
#include <mutex>

#include <poll.h>

#include "stream.h"
#include "stream_openssl.h"
#include "stream_socket.h"

namespace genie {

namespace {

using namespace openssl;

// Bytes per lock of OpenSSL, so that reader and writer alternate.
constexpr size_t BYTES_PER_SSL_CALL_MAX = 256u << 10;
// AES-GCM is safe for about 2^24 records per key; this is far below, at no measurable cost.
constexpr uint64_t TLS_RECORDS_PER_KEY = 1u << 12;

struct OpenSslDeleter {
  void operator()(SSL_CTX* context) const { functions().SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { functions().SSL_free(ssl); }
  void operator()(X509* certificate) const { functions().X509_free(certificate); }
};
using SslContextPtr = std::unique_ptr<SSL_CTX, OpenSslDeleter>;
using SslPtr = std::unique_ptr<SSL, OpenSslDeleter>;
using X509Ptr = std::unique_ptr<X509, OpenSslDeleter>;

// --- OpenSSL's transport -----------------------------------------------------------------------------------

// OpenSSL's own socket BIO may raise SIGPIPE; this one does not, and keeps the error of a failed call.
struct SocketTransport {
  std::shared_ptr<Socket> socket;
  bool peer_closed = false;  // the peer closed its side
  int error = 0;             // errno of the failed call

  // Converts the result of receive() or send() for OpenSSL.
  int to_bio_result(BIO* bio, ssize_t transferred_bytes, int retry_flag) {
    int failure = transferred_bytes < 0 ? errno : 0;
    const OpenSslFunctions& f = functions();
    f.BIO_clear_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_WRITE | BIO_FLAGS_SHOULD_RETRY);
    if (would_block(failure)) {
      f.BIO_set_flags(bio, retry_flag | BIO_FLAGS_SHOULD_RETRY);
    } else {
      error = failure;
    }
    return static_cast<int>(transferred_bytes);
  }
};

int transport_read(BIO* bio, char* into, int size) {
  auto* transport = static_cast<SocketTransport*>(functions().BIO_get_data(bio));
  ssize_t got = transport->socket->receive(into, static_cast<size_t>(size));
  if (got == 0 && size > 0) transport->peer_closed = true;
  return transport->to_bio_result(bio, got, BIO_FLAGS_READ);
}

int transport_write(BIO* bio, const char* from, int size) {
  auto* transport = static_cast<SocketTransport*>(functions().BIO_get_data(bio));
  return transport->to_bio_result(bio, transport->socket->send(from, static_cast<size_t>(size)),
                                  BIO_FLAGS_WRITE);
}

long transport_control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO_METHOD* make_transport_method() {
  const OpenSslFunctions& f = functions();
  BIO_METHOD* method = f.BIO_meth_new(f.BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "genie stream");
  if (!method) throw TlsHandshakeFailed("OpenSSL has no memory left");
  f.BIO_meth_set_read(method, transport_read);
  f.BIO_meth_set_write(method, transport_write);
  f.BIO_meth_set_ctrl(method, transport_control);
  return method;
}

BIO* new_transport_bio(SocketTransport* transport) {
  static BIO_METHOD* const method = make_transport_method();
  const OpenSslFunctions& f = functions();
  BIO* bio = f.BIO_new(method);
  if (!bio) throw TlsHandshakeFailed("OpenSSL has no memory left");
  f.BIO_set_data(bio, transport);
  f.BIO_set_init(bio, 1);
  return bio;
}

// --- error messages ----------------------------------------------------------------------------------------

std::string last_openssl_error() {
  constexpr unsigned long SYSTEM_ERROR = 1ul << 31;
  const OpenSslFunctions& f = functions();
  unsigned long code = f.ERR_get_error();
  const char* text = code ? f.ERR_reason_error_string(code) : nullptr;
  f.ERR_clear_error();
  if (code & SYSTEM_ERROR) return errno_text(static_cast<int>(code & ~SYSTEM_ERROR));
  return text ? text : "no reason given";
}

[[noreturn]] void throw_tls_refused(const std::string& what) {
  throw TlsHandshakeFailed(what + ": " + last_openssl_error());
}

// --- contexts ----------------------------------------------------------------------------------------------

SslContextPtr make_context(const SSL_METHOD* method) {
  const OpenSslFunctions& f = functions();
  SslContextPtr context(f.SSL_CTX_new(method));
  if (!context) throw_tls_refused("could not set up TLS");
  if (f.SSL_CTX_ctrl(context.get(), SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) != 1) {
    throw_tls_refused("this OpenSSL does not support TLS 1.3");
  }
  // Every connection does a full handshake: no tickets, no session cache. Read-ahead stays off, as by
  // default: downgrade_to_plaintext() needs all bytes after TLS to be still in the socket.
  f.SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET);
  f.SSL_CTX_ctrl(context.get(), SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
  f.SSL_CTX_ctrl(context.get(), SSL_CTRL_MODE,
                 SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, nullptr);
  return context;
}

void add_trusted_ca(SSL_CTX* context, const std::string& der) {
  const OpenSslFunctions& f = functions();
  const auto* start = reinterpret_cast<const unsigned char*>(der.data());
  const unsigned char* next = start;
  X509Ptr certificate(f.d2i_X509(nullptr, &next, static_cast<long>(der.size())));
  if (!certificate || next != start + der.size()) throw_tls_refused("could not parse a CA certificate");
  if (f.X509_STORE_add_cert(f.SSL_CTX_get_cert_store(context), certificate.get()) != 1) {
    throw_tls_refused("could not use a CA certificate");
  }
}

SslContextPtr make_client_context(const std::vector<std::string>& ca_der) {
  if (ca_der.empty()) throw TlsHandshakeFailed("no CA given, so the peer cannot be verified");
  const OpenSslFunctions& f = functions();
  SslContextPtr context = make_context(f.TLS_client_method());
  for (const std::string& der : ca_der) add_trusted_ca(context.get(), der);
  f.SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  return context;
}

// Replaces OpenSSL's own, which prompts at the terminal.
int reject_key_password(char*, int, int, void*) { return 0; }

SslContextPtr make_server_context(const std::string& certificate_path, const std::string& key_path) {
  const OpenSslFunctions& f = functions();
  SslContextPtr context = make_context(f.TLS_server_method());
  f.SSL_CTX_set_num_tickets(context.get(), 0);
  f.SSL_CTX_set_default_passwd_cb(context.get(), reject_key_password);
  if (f.SSL_CTX_use_certificate_chain_file(context.get(), certificate_path.c_str()) != 1) {
    throw_tls_refused("could not use the certificate " + certificate_path);
  }
  // Also fails for a key that does not match the certificate.
  if (f.SSL_CTX_use_PrivateKey_file(context.get(), key_path.c_str(), SSL_FILETYPE_PEM) != 1) {
    throw_tls_refused("could not use the key " + key_path);
  }
  return context;
}

void set_expected_server_name(SSL* ssl, const std::string& name) {
  if (name.empty() || name.find('\0') != std::string::npos) {
    throw TlsHandshakeFailed("no server name given to check the certificate against");
  }
  const OpenSslFunctions& f = functions();
  X509_VERIFY_PARAM* param = f.SSL_get0_param(ssl);
  unsigned flags = X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT;
  f.X509_VERIFY_PARAM_set_hostflags(param, flags);
  std::string hostname = name;
  if (f.X509_VERIFY_PARAM_set1_host(param, name.data(), name.size()) != 1 ||
      f.SSL_ctrl(ssl, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, hostname.data()) != 1) {
    throw_tls_refused("could not set the server name " + name);
  }
}

// --- the stream --------------------------------------------------------------------------------------------

class TlsStream final : public Stream {
 public:
  TlsStream(std::shared_ptr<Socket> socket, SSL_CTX* context)
      : transport_{std::move(socket)}, ssl_(openssl_.SSL_new(context)) {
    if (!ssl_) throw_tls_refused("could not set up TLS");
    BIO* bio = new_transport_bio(&transport_);
    openssl_.SSL_set_bio(ssl_.get(), bio, bio);
  }

  void connect(const std::string& server_name, int64_t timeout_us) {
    set_expected_server_name(ssl_.get(), server_name);
    openssl_.SSL_set_connect_state(ssl_.get());
    handshake(timeout_us);
  }

  void accept(int64_t timeout_us) {
    openssl_.SSL_set_accept_state(ssl_.get());
    handshake(timeout_us);
  }

  size_t read_some(void* into, size_t size, int64_t timeout_us) override {
    if (size == 0) return 0;
    Deadline deadline(timeout_us);
    for (;;) {
      ReadAttempt attempt = try_read_once(static_cast<char*>(into), size);
      if (attempt.bytes > 0) return attempt.bytes;
      if (!socket().wait_ready(attempt.poll_event, deadline)) return 0;
    }
  }

  size_t write_some(const void* from, size_t size) override {
    std::lock_guard lock(ssl_mutex_);
    throw_if_lost(write_failure_);
    size = std::min(size, BYTES_PER_SSL_CALL_MAX);
    size_t done = 0;
    while (done < size) {
      if (!is_write_retry_) update_tls_key_if_due();
      size_t count = 0;
      clear_errors();
      int result =
          openssl_.SSL_write_ex(ssl_.get(), static_cast<const char*>(from) + done, size - done, &count);
      is_write_retry_ = result != 1;
      if (is_write_retry_) {
        if (poll_event_after_ssl_call(result, write_failure_) == POLLIN)
          write_failure_ = "the peer requested renegotiation";
        break;
      }
      records_since_key_update_++;
      done += count;
    }
    if (done == 0) throw_if_lost(write_failure_);
    return done;
  }

  bool wait_writable(int64_t timeout_us) override {
    return socket().wait_ready(POLLOUT, Deadline(timeout_us));
  }

  void shut_down() noexcept override { socket().shut_down(); }

  bool is_encrypted() const override { return true; }

  std::unique_ptr<Stream> downgrade_to_plaintext(int64_t timeout_us) override {
    Deadline deadline(timeout_us);
    for (;;) {
      short poll_event = try_tls_shutdown_once();
      if (poll_event == 0) break;
      if (!socket().wait_ready(poll_event, deadline))
        throw ConnectionLost("timeout: the peer did not shut down TLS");
    }
    return plaintext_stream(transport_.socket);
  }

 private:
  // The result of one call: bytes, or the poll event to wait for.
  struct ReadAttempt {
    size_t bytes;
    short poll_event;
  };

  Socket& socket() { return *transport_.socket; }

  void handshake(int64_t timeout_us) {
    Deadline deadline(timeout_us);
    for (;;) {
      clear_errors();
      int result = openssl_.SSL_do_handshake(ssl_.get());
      if (result == 1) return;
      int error = openssl_.SSL_get_error(ssl_.get(), result);
      if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) throw_handshake_failure();
      if (!socket().wait_ready(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline)) {
        throw ConnectionLost("timeout during the TLS handshake");
      }
    }
  }

  [[noreturn]] void throw_handshake_failure() {
    throw_socket_error("during the TLS handshake");
    long verdict = openssl_.SSL_get_verify_result(ssl_.get());
    if (verdict != X509_V_OK) {
      const char* why = openssl_.X509_verify_cert_error_string(verdict);
      throw TlsHandshakeFailed(std::string("certificate verification failed: ") + why);
    }
    throw_tls_refused("TLS 1.3 handshake with the peer failed");
  }

  // Throws the error of the socket, if there is one: it is more precise than OpenSSL's.
  void throw_socket_error(const std::string& when) {
    socket().check_open();
    if (transport_.peer_closed) throw ConnectionLost("the peer closed the connection " + when);
    if (transport_.error) {
      throw ConnectionLost("the connection broke " + when + ": " + errno_text(transport_.error));
    }
  }

  ReadAttempt try_read_once(char* into, size_t size) {
    std::lock_guard lock(ssl_mutex_);
    throw_if_lost(read_failure_);
    size = std::min(size, BYTES_PER_SSL_CALL_MAX);
    ReadAttempt attempt{0, 0};
    while (attempt.bytes < size) {
      size_t count = 0;
      clear_errors();
      int result = openssl_.SSL_read_ex(ssl_.get(), into + attempt.bytes, size - attempt.bytes, &count);
      if (result != 1) {
        attempt.poll_event = poll_event_after_ssl_call(result, read_failure_);
        break;
      }
      attempt.bytes += count;
    }
    if (attempt.bytes == 0) throw_if_lost(read_failure_);
    return attempt;
  }

  // The poll event to wait for after a call that did nothing; 0 if the connection is lost, with the reason in
  // `loss_reason`.
  short poll_event_after_ssl_call(int ssl_result, std::string& loss_reason) {
    switch (openssl_.SSL_get_error(ssl_.get(), ssl_result)) {
      case SSL_ERROR_WANT_READ:
        return POLLIN;
      case SSL_ERROR_WANT_WRITE:
        return POLLOUT;
      case SSL_ERROR_ZERO_RETURN:
        loss_reason = "the peer closed the connection";
        return 0;
      default:
        loss_reason = connection_loss_reason();
        return 0;
    }
  }

  std::string connection_loss_reason() const {
    if (transport_.error) return "the connection broke: " + errno_text(transport_.error);
    if (transport_.peer_closed) return "connection lost: the peer disconnected without closing TLS";
    return "TLS data from the peer is corrupt: " + last_openssl_error();
  }

  void clear_errors() {
    openssl_.ERR_clear_error();
    transport_.error = 0;
  }

  void throw_if_lost(const std::string& loss_reason) const {
    transport_.socket->check_open();
    if (!loss_reason.empty()) throw ConnectionLost(loss_reason);
  }

  void update_tls_key_if_due() {
    if (records_since_key_update_ < TLS_RECORDS_PER_KEY) return;
    clear_errors();
    if (openssl_.SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) records_since_key_update_ = 0;
  }

  // The poll event to wait for; 0 when both sides have shut down TLS.
  short try_tls_shutdown_once() {
    std::lock_guard lock(ssl_mutex_);
    throw_if_lost(read_failure_);
    throw_if_lost(write_failure_);
    clear_errors();
    int result = openssl_.SSL_shutdown(ssl_.get());
    if (result == 0) result = openssl_.SSL_shutdown(ssl_.get());  // ours is sent; now wait for the peer's
    if (result == 1) {
      read_failure_ = write_failure_ = "TLS was shut down on this connection";
      return 0;
    }
    short poll_event = poll_event_after_ssl_call(result, read_failure_);
    throw_if_lost(read_failure_);
    return poll_event;
  }

  const OpenSslFunctions& openssl_ = functions();
  SocketTransport transport_;
  SslPtr ssl_;            // uses the transport, so it is destroyed first
  std::mutex ssl_mutex_;  // OpenSSL allows one thread at a time; never held while waiting
  // Why reading or writing has ended. Separate: the peer's last data can be read when writing has failed.
  std::string read_failure_;
  std::string write_failure_;
  bool is_write_retry_ = false;
  uint64_t records_since_key_update_ = 0;
};

}  // namespace

std::unique_ptr<Stream> Stream::tls_client(int fd, const std::vector<std::string>& ca_der,
                                           const std::string& server_name, int64_t timeout_us) {
  auto socket = std::make_shared<Socket>(fd);
  SslContextPtr context = make_client_context(ca_der);
  auto stream = std::make_unique<TlsStream>(std::move(socket), context.get());
  stream->connect(server_name, timeout_us);
  return stream;
}

std::unique_ptr<Stream> Stream::tls_server(int fd, const std::string& certificate_path,
                                           const std::string& key_path, int64_t timeout_us) {
  auto socket = std::make_shared<Socket>(fd);
  SslContextPtr context = make_server_context(certificate_path, key_path);
  auto stream = std::make_unique<TlsStream>(std::move(socket), context.get());
  stream->accept(timeout_us);
  return stream;
}

}  // namespace genie
