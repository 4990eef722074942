// What goes wrong while a record is carried out, and what the client is told of it.
//
// An op that fails is not the end: what it should have made is poisoned with the failure. A stream that is
// not wire.h's, or an accelerator that no longer works, is the end of the session.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "../wire.h"

namespace genie {

// As it travels: ReplyKind::Error and ReplyKind::Farewell.
struct Failure {
  std::string code;
  std::string op;
  uint64_t number = 0;
  std::string message;
};
using FailurePtr = std::shared_ptr<const Failure>;

// An op, or an argument of one, that an executor does not take.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The op gave something else than the client had said it would.
struct Mispredicted : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The session's quota does not allow it.
struct OverQuota : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A tensor that is needed was never made, because of an earlier failure.
struct Poisoned : std::exception {
  explicit Poisoned(FailurePtr because) : failure(std::move(because)) {}
  const char* what() const noexcept override { return failure->message.c_str(); }
  FailurePtr failure;
};
// What should have come from another executor did not.
struct CopyFailed : std::runtime_error {
  CopyFailed(std::string its_code, const std::string& message)
      : std::runtime_error(message), code(std::move(its_code)) {}
  std::string code;
};
// The accelerator's own error: nothing that runs on it after this can be trusted.
struct AcceleratorLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For a catch block: what the exception at hand means for the client. What ends the session goes through.
FailurePtr failure_at_hand(const std::string& op, uint64_t number);

// For the catch block around a whole session: what to say in farewell, whatever the exception is.
Failure last_words() noexcept;

void write_failure(Writer& out, const Failure& failure);

}  // namespace genie
