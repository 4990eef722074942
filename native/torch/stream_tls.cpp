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

// Between two calls of a writer the reader has its turn, and the other way round.
constexpr size_t TURN_BYTES_MAX = 256u << 10;
// AES-GCM is sound for some 2^24 records with one key; this is far below and costs nothing that shows.
constexpr uint64_t RECORDS_PER_KEY = 1u << 12;

struct Free {
  void operator()(SSL_CTX* context) const { functions().SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { functions().SSL_free(ssl); }
  void operator()(X509* certificate) const { functions().X509_free(certificate); }
};
using Context = std::unique_ptr<SSL_CTX, Free>;
using Connection = std::unique_ptr<SSL, Free>;
using Certificate = std::unique_ptr<X509, Free>;

// --- how OpenSSL reaches the socket ------------------------------------------------------------------------

// OpenSSL's own way to a socket may raise SIGPIPE; ours does not, and remembers how a call failed.
struct Transport {
  std::shared_ptr<Socket> socket;
  bool ended = false;  // the peer has closed its side
  int error = 0;       // errno of what broke the connection

  // For OpenSSL, of what receive() or send() has just returned.
  int result(BIO* bio, ssize_t done, int direction) {
    int failure = done < 0 ? errno : 0;
    const Functions& f = functions();
    f.BIO_clear_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_WRITE | BIO_FLAGS_SHOULD_RETRY);
    if (would_block(failure)) {
      f.BIO_set_flags(bio, direction | BIO_FLAGS_SHOULD_RETRY);
    } else {
      error = failure;
    }
    return static_cast<int>(done);
  }
};

int transport_read(BIO* bio, char* into, int size) {
  auto* transport = static_cast<Transport*>(functions().BIO_get_data(bio));
  ssize_t got = transport->socket->receive(into, static_cast<size_t>(size));
  if (got == 0 && size > 0) transport->ended = true;
  return transport->result(bio, got, BIO_FLAGS_READ);
}

int transport_write(BIO* bio, const char* from, int size) {
  auto* transport = static_cast<Transport*>(functions().BIO_get_data(bio));
  return transport->result(bio, transport->socket->send(from, static_cast<size_t>(size)), BIO_FLAGS_WRITE);
}

long transport_control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO_METHOD* make_transport_method() {
  const Functions& f = functions();
  BIO_METHOD* method = f.BIO_meth_new(f.BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "genie stream");
  if (!method) throw TlsRefused("OpenSSL has no memory left");
  f.BIO_meth_set_read(method, transport_read);
  f.BIO_meth_set_write(method, transport_write);
  f.BIO_meth_set_ctrl(method, transport_control);
  return method;
}

BIO* new_transport_bio(Transport* transport) {
  static BIO_METHOD* const method = make_transport_method();
  const Functions& f = functions();
  BIO* bio = f.BIO_new(method);
  if (!bio) throw TlsRefused("OpenSSL has no memory left");
  f.BIO_set_data(bio, transport);
  f.BIO_set_init(bio, 1);
  return bio;
}

// --- what OpenSSL says, in plain words ---------------------------------------------------------------------

std::string reason_of_last_error() {
  constexpr unsigned long SYSTEM_ERROR = 1ul << 31;
  const Functions& f = functions();
  unsigned long code = f.ERR_get_error();
  const char* text = code ? f.ERR_reason_error_string(code) : nullptr;
  f.ERR_clear_error();
  if (code & SYSTEM_ERROR) return error_text(static_cast<int>(code & ~SYSTEM_ERROR));
  return text ? text : "no reason given";
}

[[noreturn]] void refuse(const std::string& what) { throw TlsRefused(what + ": " + reason_of_last_error()); }

// --- what may be spoken ------------------------------------------------------------------------------------

Context new_context(const SSL_METHOD* method) {
  const Functions& f = functions();
  Context context(f.SSL_CTX_new(method));
  if (!context) refuse("TLS cannot be set up");
  if (f.SSL_CTX_ctrl(context.get(), SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) != 1) {
    refuse("this OpenSSL has no TLS 1.3");
  }
  // Every connection is authenticated anew: no tickets, no cache of sessions. Read-ahead is off by default
  // and stays so: without_tls() needs every byte behind TLS to be still in the socket.
  f.SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET);
  f.SSL_CTX_ctrl(context.get(), SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
  f.SSL_CTX_ctrl(context.get(), SSL_CTRL_MODE,
                 SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, nullptr);
  return context;
}

void trust(SSL_CTX* context, const std::string& der) {
  const Functions& f = functions();
  const auto* start = reinterpret_cast<const unsigned char*>(der.data());
  const unsigned char* next = start;
  Certificate certificate(f.d2i_X509(nullptr, &next, static_cast<long>(der.size())));
  if (!certificate || next != start + der.size()) refuse("a CA's certificate cannot be read");
  if (f.X509_STORE_add_cert(f.SSL_CTX_get_cert_store(context), certificate.get()) != 1) {
    refuse("a CA's certificate cannot be used");
  }
}

Context client_context(const std::vector<std::string>& ca_der) {
  if (ca_der.empty()) throw TlsRefused("no CA is given, so there is no way to trust whoever answers");
  const Functions& f = functions();
  Context context = new_context(f.TLS_client_method());
  for (const std::string& der : ca_der) trust(context.get(), der);
  f.SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  return context;
}

// Instead of OpenSSL's own, which asks at the terminal.
int no_password(char*, int, int, void*) { return 0; }

Context server_context(const std::string& certificate_path, const std::string& key_path) {
  const Functions& f = functions();
  Context context = new_context(f.TLS_server_method());
  f.SSL_CTX_set_num_tickets(context.get(), 0);
  f.SSL_CTX_set_default_passwd_cb(context.get(), no_password);
  if (f.SSL_CTX_use_certificate_chain_file(context.get(), certificate_path.c_str()) != 1) {
    refuse("the certificate " + certificate_path + " cannot be used");
  }
  // Also refuses a key that does not belong to the certificate.
  if (f.SSL_CTX_use_PrivateKey_file(context.get(), key_path.c_str(), SSL_FILETYPE_PEM) != 1) {
    refuse("the key " + key_path + " cannot be used");
  }
  return context;
}

void expect_name(SSL* ssl, const std::string& name) {
  if (name.empty() || name.find('\0') != std::string::npos) {
    throw TlsRefused("no name is given that the peer's certificate must carry");
  }
  const Functions& f = functions();
  X509_VERIFY_PARAM* param = f.SSL_get0_param(ssl);
  unsigned flags = X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT;
  f.X509_VERIFY_PARAM_set_hostflags(param, flags);
  std::string shown = name;
  if (f.X509_VERIFY_PARAM_set1_host(param, name.data(), name.size()) != 1 ||
      f.SSL_ctrl(ssl, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, shown.data()) != 1) {
    refuse("the name " + name + " cannot be checked");
  }
}

// --- the stream --------------------------------------------------------------------------------------------

class TlsStream final : public Stream {
 public:
  TlsStream(std::shared_ptr<Socket> socket, SSL_CTX* context)
      : transport_{std::move(socket)}, ssl_(f_.SSL_new(context)) {
    if (!ssl_) refuse("TLS cannot be set up");
    BIO* bio = new_transport_bio(&transport_);
    f_.SSL_set_bio(ssl_.get(), bio, bio);
  }

  void connect(const std::string& server_name, int64_t timeout_us) {
    expect_name(ssl_.get(), server_name);
    f_.SSL_set_connect_state(ssl_.get());
    shake_hands(timeout_us);
  }

  void accept(int64_t timeout_us) {
    f_.SSL_set_accept_state(ssl_.get());
    shake_hands(timeout_us);
  }

  size_t read_some(void* into, size_t size, int64_t timeout_us) override {
    if (size == 0) return 0;
    Deadline deadline(timeout_us);
    for (;;) {
      Step step = read_turn(static_cast<char*>(into), size);
      if (step.bytes > 0) return step.bytes;
      if (!socket().wait(step.wait_for, deadline)) return 0;
    }
  }

  size_t write_some(const void* from, size_t size) override {
    std::lock_guard lock(using_);
    check_usable(writing_);
    size = std::min(size, TURN_BYTES_MAX);
    size_t done = 0;
    while (done < size) {
      if (!retrying_) renew_key_when_due();
      size_t count = 0;
      forget_errors();
      int result = f_.SSL_write_ex(ssl_.get(), static_cast<const char*>(from) + done, size - done, &count);
      retrying_ = result != 1;
      if (retrying_) {
        if (outcome(result, writing_) == POLLIN) writing_ = "the peer asks for another handshake";
        break;
      }
      records_with_key_++;
      done += count;
    }
    if (done == 0) check_usable(writing_);
    return done;
  }

  bool wait_writable(int64_t timeout_us) override { return socket().wait(POLLOUT, Deadline(timeout_us)); }

  void shut_down() noexcept override { socket().shut_down(); }

  bool encrypted() const override { return true; }

  std::unique_ptr<Stream> without_tls(int64_t timeout_us) override {
    Deadline deadline(timeout_us);
    for (;;) {
      short wait_for = shutdown_turn();
      if (wait_for == 0) break;
      if (!socket().wait(wait_for, deadline)) throw ConnectionLost("the peer did not end TLS in time");
    }
    return bare_stream(transport_.socket);
  }

 private:
  // What one turn at OpenSSL gave: bytes, or the event of poll to wait for.
  struct Step {
    size_t bytes;
    short wait_for;
  };

  Socket& socket() { return *transport_.socket; }

  void shake_hands(int64_t timeout_us) {
    Deadline deadline(timeout_us);
    for (;;) {
      forget_errors();
      int result = f_.SSL_do_handshake(ssl_.get());
      if (result == 1) return;
      int error = f_.SSL_get_error(ssl_.get(), result);
      if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) refuse_handshake();
      if (!socket().wait(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline)) {
        throw ConnectionLost("the peer did not finish the TLS handshake in time");
      }
    }
  }

  [[noreturn]] void refuse_handshake() {
    check_transport("during the TLS handshake");
    long verdict = f_.SSL_get_verify_result(ssl_.get());
    if (verdict != X509_V_OK) {
      const char* why = f_.X509_verify_cert_error_string(verdict);
      throw TlsRefused(std::string("the peer's certificate is refused: ") + why);
    }
    refuse("no TLS 1.3 could be made with the peer");
  }

  // The better reason, when the trouble was below TLS.
  void check_transport(const std::string& when) {
    socket().check_open();
    if (transport_.ended) throw ConnectionLost("the peer has closed the connection " + when);
    if (transport_.error) {
      throw ConnectionLost("the connection broke " + when + ": " + error_text(transport_.error));
    }
  }

  Step read_turn(char* into, size_t size) {
    std::lock_guard lock(using_);
    check_usable(reading_);
    size = std::min(size, TURN_BYTES_MAX);
    Step step{0, 0};
    while (step.bytes < size) {
      size_t count = 0;
      forget_errors();
      int result = f_.SSL_read_ex(ssl_.get(), into + step.bytes, size - step.bytes, &count);
      if (result != 1) {
        step.wait_for = outcome(result, reading_);
        break;
      }
      step.bytes += count;
    }
    if (step.bytes == 0) check_usable(reading_);
    return step;
  }

  // The event to wait for after a call that did nothing; 0 when no more will come of it, and `lost` says why.
  short outcome(int result, std::string& lost) {
    switch (f_.SSL_get_error(ssl_.get(), result)) {
      case SSL_ERROR_WANT_READ:
        return POLLIN;
      case SSL_ERROR_WANT_WRITE:
        return POLLOUT;
      case SSL_ERROR_ZERO_RETURN:
        lost = "the peer has closed the connection";
        return 0;
      default:
        lost = reason_of_loss();
        return 0;
    }
  }

  std::string reason_of_loss() const {
    if (transport_.error) return "the connection broke: " + error_text(transport_.error);
    if (transport_.ended) return "the connection was cut: the peer is gone without a word";
    return "what came from the peer is not what it sent: " + reason_of_last_error();
  }

  void forget_errors() {
    f_.ERR_clear_error();
    transport_.error = 0;
  }

  void check_usable(const std::string& lost) const {
    transport_.socket->check_open();
    if (!lost.empty()) throw ConnectionLost(lost);
  }

  void renew_key_when_due() {
    if (records_with_key_ < RECORDS_PER_KEY) return;
    forget_errors();
    if (f_.SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) records_with_key_ = 0;
  }

  // The event to wait for; 0 when both sides have said that TLS is over.
  short shutdown_turn() {
    std::lock_guard lock(using_);
    check_usable(reading_);
    check_usable(writing_);
    forget_errors();
    int result = f_.SSL_shutdown(ssl_.get());
    if (result == 0) result = f_.SSL_shutdown(ssl_.get());  // ours is sent; now for the peer's
    if (result == 1) {
      reading_ = writing_ = "TLS has been ended on this connection";
      return 0;
    }
    short wait_for = outcome(result, reading_);
    check_usable(reading_);
    return wait_for;
  }

  const Functions& f_ = functions();
  Transport transport_;
  Connection ssl_;    // reaches the transport, so it goes first
  std::mutex using_;  // OpenSSL allows one thread at a time; never held while waiting
  // Why no more can be read or written. Apart, because a peer's last words can be read when it takes no more.
  std::string reading_;
  std::string writing_;
  bool retrying_ = false;
  uint64_t records_with_key_ = 0;
};

}  // namespace

std::unique_ptr<Stream> Stream::tls_client(int fd, const std::vector<std::string>& ca_der,
                                           const std::string& server_name, int64_t timeout_us) {
  auto socket = std::make_shared<Socket>(fd);
  Context context = client_context(ca_der);
  auto stream = std::make_unique<TlsStream>(std::move(socket), context.get());
  stream->connect(server_name, timeout_us);
  return stream;
}

std::unique_ptr<Stream> Stream::tls_server(int fd, const std::string& certificate_path,
                                           const std::string& key_path, int64_t timeout_us) {
  auto socket = std::make_shared<Socket>(fd);
  Context context = server_context(certificate_path, key_path);
  auto stream = std::make_unique<TlsStream>(std::move(socket), context.get());
  stream->accept(timeout_us);
  return stream;
}

}  // namespace genie
