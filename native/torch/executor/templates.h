// What a client says once about a call and uses many times: which op, and how its arguments and outputs look.
// Decoded and held against the op's own declaration once; see wire.h for the form. Not for: calling (ops.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Device.h>

#include "../wire.h"
#include "look.h"

namespace genie {

// One argument, or one item of a list. `kind` says what has to be done for each call: Integer stands for
// everything that never changes, and is in `constant`.
struct Argument {
  ArgumentKind kind = ArgumentKind::None;
  bool has_offset = false;
  bool written = false;
  c10::IValue constant;
  std::unique_ptr<Look> look;   // Tensor
  at::Tensor scalar;            // ScalarTensor; filled anew for each call
  std::vector<Argument> items;  // List
  c10::TypePtr item_type;       // List
};

// The next of what travels with a call, which has been found to be there as a whole.
template <class T>
T next_data(const uint8_t*& data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  data += sizeof value;
  return value;
}

// Calls `visit(argument, storage)` for every tensor among the arguments, those in lists included.
template <class Visit>
void each_tensor(const std::vector<Argument>& arguments, const uint8_t*& data, const Visit& visit) {
  for (const Argument& argument : arguments) {
    switch (argument.kind) {
      case ArgumentKind::Tensor:
        visit(argument, next_data<uint32_t>(data));
        data += argument.has_offset ? sizeof(int64_t) : 0;
        break;
      case ArgumentKind::ScalarTensor:
        data += SCALAR_BYTES;
        break;
      case ArgumentKind::IntegerData:
      case ArgumentKind::FloatData:
        data += sizeof(int64_t);
        break;
      case ArgumentKind::Generator:
        data += sizeof(uint32_t);
        break;
      case ArgumentKind::List:
        each_tensor(argument.items, data, visit);
        break;
      default:
        break;
    }
  }
}

struct Output {
  OutputKind kind = OutputKind::None;
  uint32_t index = 0;   // Same
  int64_t integer = 0;  // Integer
  Look look;            // New
  std::vector<Output> items;
};

struct Template {
  std::string name;     // with the overload: "aten::add.Tensor"
  std::string refusal;  // why it may not run; then `op` is not there
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> arguments;
  bool predicted = false;
  std::vector<Output> outputs;
  size_t data_bytes = 0;  // that travel with each call
  uint32_t tensors = 0;   // among the arguments
  uint32_t new_outputs = 0;
  uint64_t new_bytes = 0;        // that the predicted outputs take
  int size_argument = -1;        // an argument that says how much memory the op will take; it comes as data
  uint64_t announced_bytes = 0;  // the same, when it never changes; a lower bound
  uint32_t nodes = 0;            // arguments and outputs, those in lists too
};

// The memory that a tensor of these sizes takes, at least; UINT64_MAX when it cannot be counted.
uint64_t announced_bytes(c10::ArrayRef<int64_t> sizes, uint64_t item_bytes);

// Decodes templates. `allowed_ops` are names without namespace and overload.
class TemplateReader {
 public:
  TemplateReader(c10::Device device, std::vector<std::string> allowed_ops);

  // ProtocolError when the body is malformed. An op that may not run gives a template with a refusal.
  std::unique_ptr<Template> read(Reader& body) const;

 private:
  void check(Template& made, const std::string& name, const std::string& overload) const;

  c10::Device device_;
  std::unordered_set<std::string> allowed_;
};

}  // namespace genie
