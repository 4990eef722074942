#include "failure.h"

#include <new>

#include <c10/util/Exception.h>

namespace genie {

namespace {

// Codes of genie/errors.py; others are in error_code of wire.h.
constexpr const char* REMOTE_OP_CODE = "device.remote_op";
constexpr const char* OP_REFUSED_CODE = "device.op_refused";
constexpr size_t ERROR_MESSAGE_BYTES_MAX = 4000;
static_assert(ERROR_MESSAGE_BYTES_MAX <= TEXT_BYTES_MAX);

struct ErrorCodeAndMessage {
  std::string code;
  std::string message;
};

// Length of the UTF-8 character at this position; 0 if it is invalid.
size_t utf8_character_bytes(const std::string& text, size_t at) {
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

// Valid UTF-8 of limited length: a message may quote arbitrary bytes of the client.
std::string to_valid_utf8(const std::string& message) {
  std::string text;
  for (size_t at = 0; at < message.size();) {
    size_t bytes = utf8_character_bytes(message, at);
    if (text.size() + (bytes ? bytes : 1) > ERROR_MESSAGE_BYTES_MAX) break;
    text += bytes ? message.substr(at, bytes) : "?";
    at += bytes ? bytes : 1;
  }
  return text;
}

// The CPU allocator has no exception type for this.
bool is_out_of_memory(const std::string& message) {
  return message.find("DefaultCPUAllocator: can't allocate memory") != std::string::npos ||
         message.find("DefaultCPUAllocator: not enough memory") != std::string::npos;
}

ErrorCodeAndMessage classify_torch_error(const c10::Error& error) {
  std::string message = error.what_without_backtrace();
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) || is_out_of_memory(message)) {
    return {error_code::OUT_OF_MEMORY, message};
  }
  if (dynamic_cast<const c10::IndexError*>(&error)) return {error_code::INDEX_ERROR, message};
  if (dynamic_cast<const c10::ValueError*>(&error)) return {error_code::VALUE_ERROR, message};
  if (dynamic_cast<const c10::TypeError*>(&error)) return {error_code::TYPE_ERROR, message};
  if (dynamic_cast<const c10::NotImplementedError*>(&error))
    return {error_code::NOT_IMPLEMENTED_ERROR, message};
  if (dynamic_cast<const c10::LinAlgError*>(&error)) return {error_code::LINALG_ERROR, message};
  return {REMOTE_OP_CODE, message};
}

ErrorCodeAndMessage classify_current_exception() {
  try {
    throw;
  } catch (const ProtocolError&) {
    throw;
  } catch (const AcceleratorFailed&) {
    throw;
  } catch (const c10::AcceleratorError& error) {
    throw AcceleratorFailed(error.what_without_backtrace());
  } catch (const OpRefused& error) {
    return {OP_REFUSED_CODE, error.what()};
  } catch (const QuotaExceeded& error) {
    return {error_code::OUT_OF_MEMORY, error.what()};
  } catch (const TransferFailed& error) {
    return {to_valid_utf8(error.code), error.what()};
  } catch (const c10::Error& error) {
    return classify_torch_error(error);
  } catch (const std::bad_alloc&) {
    return {error_code::OUT_OF_MEMORY, "the executor is out of memory"};
  } catch (const std::exception& error) {
    return {is_out_of_memory(error.what()) ? error_code::OUT_OF_MEMORY : REMOTE_OP_CODE, error.what()};
  } catch (...) {
    return {REMOTE_OP_CODE, "unknown error"};
  }
}

}  // namespace

FailurePtr failure_from_current_exception(const std::string& op, uint64_t op_number) {
  try {
    throw;
  } catch (const PoisonedTensor& error) {
    return error.failure;
  } catch (...) {
    ErrorCodeAndMessage current = classify_current_exception();
    return std::make_shared<Failure>(
        Failure{current.code, to_valid_utf8(op), op_number, to_valid_utf8(current.message)});
  }
}

Failure fatal_failure_from_current_exception() noexcept {
  try {
    try {
      throw;
    } catch (const ProtocolError& error) {
      return {PROTOCOL_ERROR_CODE, "", 0, to_valid_utf8(error.what())};
    } catch (...) {
      return *failure_from_current_exception("", 0);
    }
  } catch (const AcceleratorFailed& error) {
    return {REMOTE_OP_CODE, "", 0, to_valid_utf8(error.what())};
  } catch (...) {
    return {REMOTE_OP_CODE, "", 0, ""};
  }
}

}  // namespace genie
