// Errors while a record is executed, and how they are reported to the client.
//
// An op that fails does not end the session: its outputs are poisoned with the failure. A protocol violation
// or an accelerator that has failed ends it.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "../wire.h"

namespace genie {

using Failure = RemoteError;
using FailurePtr = std::shared_ptr<const Failure>;
// Error code of a protocol violation.
inline constexpr const char* PROTOCOL_ERROR_CODE = "transport.protocol";

// An op, or an argument of one, that the executor does not allow.
struct OpRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The outputs of an op differ from those that the client predicted.
struct OutputMismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The memory quota of the session is exceeded.
struct QuotaExceeded : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// An input was never created because of an earlier failure.
struct PoisonedTensor : std::exception {
  explicit PoisonedTensor(FailurePtr cause) : failure(std::move(cause)) {}
  const char* what() const noexcept override { return failure->message.c_str(); }
  FailurePtr failure;
};
// A copy from another executor failed.
struct TransferFailed : std::runtime_error {
  TransferFailed(std::string error_code, const std::string& message)
      : std::runtime_error(message), code(std::move(error_code)) {}
  std::string code;
};
// An error of the accelerator itself; results of later work on it are unreliable.
struct AcceleratorFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In a catch block: converts the current exception into a Failure. Rethrows what ends the session.
FailurePtr failure_from_current_exception(const std::string& op, uint64_t op_number);

// In the catch block around a session: converts any current exception into the error that ends it.
Failure fatal_failure_from_current_exception() noexcept;

}  // namespace genie
