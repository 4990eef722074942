#include "stream_openssl.h"

#include <mutex>

#include <dlfcn.h>

#include "stream.h"

namespace genie::openssl {

namespace {

std::mutex path_guard;
std::string& openssl_library_path() {
  static std::string path;
  return path;
}

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function) throw TlsRefused(std::string("the OpenSSL of this machine is too old: missing ") + name);
}

Functions look_up_all(void* library) {
  Functions found;
#define LOOK_UP_FUNCTION(result, name, arguments) look_up(library, #name, found.name);
  FOR_EACH_OPENSSL_FUNCTION(LOOK_UP_FUNCTION)
#undef LOOK_UP_FUNCTION
  return found;
}

// Never closed: connections use it until the process exits. dlsym also searches the dependencies of the
// library, so one handle serves libssl and libcrypto.
void* try_open(const std::string& path) {
  if (path.empty()) return nullptr;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  return library && ::dlsym(library, "SSL_new") ? library : nullptr;
}

Functions load() {
  std::string linked;
  {
    std::lock_guard lock(path_guard);
    linked = openssl_library_path();
  }
  for (const std::string& path : {linked, std::string("libssl.so.3"), std::string("libssl.so.1.1")}) {
    if (void* library = try_open(path)) return look_up_all(library);
  }
  throw TlsRefused("TLS needs OpenSSL, which is not installed (Debian, Ubuntu: apt install libssl3)");
}

}  // namespace

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

void use_openssl_of(const std::string& library_path) {
  std::lock_guard lock(path_guard);
  openssl_library_path() = library_path;
}

}  // namespace genie::openssl
