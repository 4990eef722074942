#include "failure.h"

#include <new>

#include <c10/util/Exception.h>

namespace genie {

namespace {

// The codes of genie/errors.py. Those that begin with "remote." name an exception of Python's or torch's own.
constexpr const char* PROTOCOL = "transport.protocol";
constexpr const char* REMOTE_OP = "device.remote_op";
constexpr const char* OP_REFUSED = "device.op_refused";
constexpr const char* OUT_OF_MEMORY = "device.out_of_memory";
constexpr size_t MESSAGE_BYTES_MAX = 4000;
static_assert(MESSAGE_BYTES_MAX <= TEXT_BYTES_MAX);

struct Said {
  std::string code;
  std::string message;
};

// How long the UTF-8 character is that begins here; 0 when none does.
size_t character_bytes(const std::string& text, size_t at) {
  auto first = static_cast<unsigned char>(text[at]);
  size_t bytes = 0;
  if (first < 0x80) {
    bytes = 1;
  } else if (first >> 5 == 0x06) {
    bytes = 2;
  } else if (first >> 4 == 0x0E) {
    bytes = 3;
  } else if (first >> 3 == 0x1E) {
    bytes = 4;
  }
  if (bytes > text.size() - at) return 0;
  for (size_t i = 1; i < bytes; i++) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 0;
  }
  return bytes;
}

// Whole characters only, and not too many: a message may quote what the client sent, which may be anything.
std::string as_text(const std::string& message) {
  std::string text;
  for (size_t at = 0; at < message.size();) {
    size_t bytes = character_bytes(message, at);
    if (text.size() + (bytes ? bytes : 1) > MESSAGE_BYTES_MAX) break;
    text += bytes ? message.substr(at, bytes) : "?";
    at += bytes ? bytes : 1;
  }
  return text;
}

// The CPU allocator has no type of its own for this.
bool says_out_of_memory(const std::string& message) {
  return message.find("DefaultCPUAllocator: can't allocate memory") != std::string::npos ||
         message.find("DefaultCPUAllocator: not enough memory") != std::string::npos;
}

Said torch_error(const c10::Error& error) {
  std::string message = error.what_without_backtrace();
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) || says_out_of_memory(message)) {
    return {OUT_OF_MEMORY, message};
  }
  if (dynamic_cast<const c10::IndexError*>(&error)) return {"remote.IndexError", message};
  if (dynamic_cast<const c10::ValueError*>(&error)) return {"remote.ValueError", message};
  if (dynamic_cast<const c10::TypeError*>(&error)) return {"remote.TypeError", message};
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return {"remote.NotImplementedError", message};
  if (dynamic_cast<const c10::LinAlgError*>(&error)) return {"remote.LinAlgError", message};
  return {REMOTE_OP, message};
}

Said said_at_hand() {
  try {
    throw;
  } catch (const ProtocolError&) {
    throw;
  } catch (const AcceleratorLost&) {
    throw;
  } catch (const c10::AcceleratorError& error) {
    throw AcceleratorLost(error.what_without_backtrace());
  } catch (const Refused& error) {
    return {OP_REFUSED, error.what()};
  } catch (const OverQuota& error) {
    return {OUT_OF_MEMORY, error.what()};
  } catch (const CopyFailed& error) {
    return {as_text(error.code), error.what()};
  } catch (const c10::Error& error) {
    return torch_error(error);
  } catch (const std::bad_alloc&) {
    return {OUT_OF_MEMORY, "the executor is out of memory"};
  } catch (const std::exception& error) {
    return {says_out_of_memory(error.what()) ? OUT_OF_MEMORY : REMOTE_OP, error.what()};
  } catch (...) {
    return {REMOTE_OP, "an error without a name"};
  }
}

}  // namespace

FailurePtr failure_at_hand(const std::string& op, uint64_t number) {
  try {
    throw;
  } catch (const Poisoned& error) {
    return error.failure;
  } catch (...) {
    Said said = said_at_hand();
    return std::make_shared<Failure>(Failure{said.code, as_text(op), number, as_text(said.message)});
  }
}

Failure last_words() noexcept {
  try {
    try {
      throw;
    } catch (const ProtocolError& error) {
      return {PROTOCOL, "", 0, as_text(error.what())};
    } catch (...) {
      return *failure_at_hand("", 0);
    }
  } catch (const AcceleratorLost& error) {
    return {REMOTE_OP, "", 0, as_text(error.what())};
  } catch (...) {
    return {REMOTE_OP, "", 0, ""};
  }
}

void write_failure(Writer& out, const Failure& failure) {
  out.text(failure.code);
  out.text(failure.op);
  out.u64(failure.number);
  out.text(failure.message);
}

}  // namespace genie
