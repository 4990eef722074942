// The OpenSSL functions that TLS streams use, looked up at run time: compiling needs neither headers nor
// library, and the process has one OpenSSL, the one of its Python.
//
// Versions 1.1.1 and 3.x. Names and numbers are OpenSSL's own, so that its manual pages explain them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace genie::openssl {

struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct BIO;
struct BIO_METHOD;
struct X509;
struct X509_STORE;
struct X509_VERIFY_PARAM;

using PasswordCallback = int (*)(char*, int, int, void*);

constexpr int SSL_ERROR_WANT_READ = 2;
constexpr int SSL_ERROR_WANT_WRITE = 3;
constexpr int SSL_ERROR_ZERO_RETURN = 6;
constexpr int SSL_VERIFY_PEER = 1;
constexpr int SSL_FILETYPE_PEM = 1;
constexpr int SSL_KEY_UPDATE_NOT_REQUESTED = 0;
constexpr int SSL_CTRL_MODE = 33;
constexpr int SSL_CTRL_SET_SESS_CACHE_MODE = 44;
constexpr int SSL_CTRL_SET_TLSEXT_HOSTNAME = 55;
constexpr int SSL_CTRL_SET_MIN_PROTO_VERSION = 123;
constexpr long SSL_MODE_ENABLE_PARTIAL_WRITE = 1;
constexpr long SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER = 2;
constexpr long SSL_SESS_CACHE_OFF = 0;
constexpr uint64_t SSL_OP_NO_TICKET = 1u << 14;
constexpr long TLS1_3_VERSION = 0x0304;
constexpr long TLSEXT_NAMETYPE_host_name = 0;
constexpr long X509_V_OK = 0;
constexpr unsigned X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS = 0x4;
constexpr unsigned X509_CHECK_FLAG_NEVER_CHECK_SUBJECT = 0x20;
constexpr int BIO_TYPE_SOURCE_SINK = 0x0400;
constexpr int BIO_CTRL_FLUSH = 11;
constexpr int BIO_FLAGS_READ = 0x01;
constexpr int BIO_FLAGS_WRITE = 0x02;
constexpr int BIO_FLAGS_SHOULD_RETRY = 0x08;

// X(result, name, arguments)
#define FOR_EACH_OPENSSL_FUNCTION(X)                                             \
  X(const SSL_METHOD*, TLS_client_method, ())                                    \
  X(const SSL_METHOD*, TLS_server_method, ())                                    \
  X(SSL_CTX*, SSL_CTX_new, (const SSL_METHOD*))                                  \
  X(void, SSL_CTX_free, (SSL_CTX*))                                              \
  X(long, SSL_CTX_ctrl, (SSL_CTX*, int, long, void*))                            \
  X(uint64_t, SSL_CTX_set_options, (SSL_CTX*, uint64_t))                         \
  X(int, SSL_CTX_set_num_tickets, (SSL_CTX*, size_t))                            \
  X(void, SSL_CTX_set_verify, (SSL_CTX*, int, void*))                            \
  X(int, SSL_CTX_use_certificate_chain_file, (SSL_CTX*, const char*))            \
  X(int, SSL_CTX_use_PrivateKey_file, (SSL_CTX*, const char*, int))              \
  X(void, SSL_CTX_set_default_passwd_cb, (SSL_CTX*, PasswordCallback))           \
  X(X509_STORE*, SSL_CTX_get_cert_store, (const SSL_CTX*))                       \
  X(SSL*, SSL_new, (SSL_CTX*))                                                   \
  X(void, SSL_free, (SSL*))                                                      \
  X(long, SSL_ctrl, (SSL*, int, long, void*))                                    \
  X(void, SSL_set_bio, (SSL*, BIO*, BIO*))                                       \
  X(void, SSL_set_connect_state, (SSL*))                                         \
  X(void, SSL_set_accept_state, (SSL*))                                          \
  X(X509_VERIFY_PARAM*, SSL_get0_param, (SSL*))                                  \
  X(int, SSL_do_handshake, (SSL*))                                               \
  X(int, SSL_read_ex, (SSL*, void*, size_t, size_t*))                            \
  X(int, SSL_write_ex, (SSL*, const void*, size_t, size_t*))                     \
  X(int, SSL_key_update, (SSL*, int))                                            \
  X(int, SSL_shutdown, (SSL*))                                                   \
  X(int, SSL_get_error, (const SSL*, int))                                       \
  X(long, SSL_get_verify_result, (const SSL*))                                   \
  X(int, X509_VERIFY_PARAM_set1_host, (X509_VERIFY_PARAM*, const char*, size_t)) \
  X(void, X509_VERIFY_PARAM_set_hostflags, (X509_VERIFY_PARAM*, unsigned))       \
  X(X509*, d2i_X509, (X509**, const unsigned char**, long))                      \
  X(void, X509_free, (X509*))                                                    \
  X(int, X509_STORE_add_cert, (X509_STORE*, X509*))                              \
  X(const char*, X509_verify_cert_error_string, (long))                          \
  X(int, BIO_get_new_index, ())                                                  \
  X(BIO_METHOD*, BIO_meth_new, (int, const char*))                               \
  X(int, BIO_meth_set_write, (BIO_METHOD*, int (*)(BIO*, const char*, int)))     \
  X(int, BIO_meth_set_read, (BIO_METHOD*, int (*)(BIO*, char*, int)))            \
  X(int, BIO_meth_set_ctrl, (BIO_METHOD*, long (*)(BIO*, int, long, void*)))     \
  X(BIO*, BIO_new, (const BIO_METHOD*))                                          \
  X(void, BIO_set_data, (BIO*, void*))                                           \
  X(void*, BIO_get_data, (BIO*))                                                 \
  X(void, BIO_set_init, (BIO*, int))                                             \
  X(void, BIO_set_flags, (BIO*, int))                                            \
  X(void, BIO_clear_flags, (BIO*, int))                                          \
  X(unsigned long, ERR_get_error, ())                                            \
  X(const char*, ERR_reason_error_string, (unsigned long))                       \
  X(void, ERR_clear_error, ())

struct OpenSslFunctions {
#define DECLARE_FUNCTION(result, name, arguments) result(*name) arguments;
  FOR_EACH_OPENSSL_FUNCTION(DECLARE_FUNCTION)
#undef DECLARE_FUNCTION
};

// Looked up at the first call. TlsHandshakeFailed if there is no OpenSSL, or it lacks a function.
const OpenSslFunctions& functions();

// Sets a library that is linked to the OpenSSL to use (Python's `_ssl`); it is tried before the usual names.
// Call it before the first functions().
void set_openssl_library(const std::string& library_path);

}  // namespace genie::openssl
