#include "stream_openssl.h"

#include <mutex>

#include <dlfcn.h>

#include "stream.h"

namespace genie::openssl {

namespace {

std::mutex openssl_library_path_mutex;
std::string& openssl_library_path() {
  static std::string path;
  return path;
}

template <class Function>
void look_up_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function)
    throw TlsHandshakeFailed(std::string("the OpenSSL of this machine is too old: missing ") + name);
}

OpenSslFunctions look_up_functions(void* library) {
  OpenSslFunctions found;
#define LOOK_UP_FUNCTION(result, name, arguments) look_up_function(library, #name, found.name);
  FOR_EACH_OPENSSL_FUNCTION(LOOK_UP_FUNCTION)
#undef LOOK_UP_FUNCTION
  return found;
}

// Never closed: connections use it until the process exits. dlsym also searches the dependencies of the
// library, so one handle serves libssl and libcrypto.
void* try_open_library(const std::string& path) {
  if (path.empty()) return nullptr;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  return library && ::dlsym(library, "SSL_new") ? library : nullptr;
}

OpenSslFunctions load_openssl() {
  std::string linked;
  {
    std::lock_guard lock(openssl_library_path_mutex);
    linked = openssl_library_path();
  }
  for (const std::string& path : {linked, std::string("libssl.so.3"), std::string("libssl.so.1.1")}) {
    if (void* library = try_open_library(path)) return look_up_functions(library);
  }
  throw TlsHandshakeFailed("TLS needs OpenSSL, which is not installed (Debian, Ubuntu: apt install libssl3)");
}

}  // namespace

const OpenSslFunctions& functions() {
  static const OpenSslFunctions loaded = load_openssl();
  return loaded;
}

void set_openssl_library(const std::string& library_path) {
  std::lock_guard lock(openssl_library_path_mutex);
  openssl_library_path() = library_path;
}

}  // namespace genie::openssl
