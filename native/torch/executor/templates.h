// Templates: an op with the metadata of its arguments and outputs, which the client sends once and uses for
// many calls. Decoded and checked against the schema of the op once; wire.h defines the format.
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
#include "argument_checks.h"
#include "tensor_meta.h"

namespace genie {

// One argument, or one item of a list. After the check against the schema, kind Integer means any constant.
struct TemplateArgument {
  ArgumentKind kind = ArgumentKind::None;
  bool has_offset = false;
  bool is_written = false;
  c10::IValue constant;
  std::unique_ptr<TensorMeta> meta;     // Tensor
  at::Tensor scalar;                    // ScalarTensor; filled for each call
  std::vector<TemplateArgument> items;  // List
  c10::TypePtr item_type;               // List
};

// Reads the next value from the data of a call, whose size has been checked.
template <class T>
T read_next_value(const uint8_t*& call_data) {
  T value;
  std::memcpy(&value, call_data, sizeof value);
  call_data += sizeof value;
  return value;
}

// Calls `visit(argument, storage)` for every tensor among the arguments, those in lists included.
template <class Visit>
void for_each_tensor_argument(const std::vector<TemplateArgument>& arguments, const uint8_t*& call_data,
                              const Visit& visit) {
  for (const TemplateArgument& argument : arguments) {
    switch (argument.kind) {
      case ArgumentKind::Tensor:
        visit(argument, read_next_value<uint32_t>(call_data));
        call_data += argument.has_offset ? sizeof(int64_t) : 0;
        break;
      case ArgumentKind::ScalarTensor:
        call_data += SCALAR_TENSOR_BYTES;
        break;
      case ArgumentKind::IntegerData:
      case ArgumentKind::FloatData:
        call_data += sizeof(int64_t);
        break;
      case ArgumentKind::Generator:
        call_data += sizeof(uint32_t);
        break;
      case ArgumentKind::List:
        for_each_tensor_argument(argument.items, call_data, visit);
        break;
      default:
        break;
    }
  }
}

struct ExpectedOutput {
  OutputKind kind = OutputKind::None;
  uint32_t alias_index = 0;  // Alias
  int64_t integer = 0;       // Integer
  TensorMeta meta;           // New
  std::vector<ExpectedOutput> items;
};

struct DecodedTemplate {
  std::string name;            // with the overload: "aten::add.Tensor"
  std::string refusal_reason;  // why it is not allowed; then `op` is empty
  std::optional<c10::OperatorHandle> op;
  ArgumentCheck argument_check = nullptr;  // null if the kernels of the op check all arguments
  std::vector<TemplateArgument> arguments;
  bool has_predicted_outputs = false;
  std::vector<ExpectedOutput> outputs;
  size_t call_data_bytes = 0;          // sent with each call
  uint32_t tensor_argument_count = 0;  // among the arguments
  uint32_t new_output_count = 0;
  uint64_t new_output_bytes = 0;   // of the predicted outputs
  int size_argument_index = -1;    // of the argument with the size of the output, if it is not constant
  uint64_t output_bytes_min = 0;   // lower bound, from a constant size argument
  bool runs_in_grad_mode = false;  // the op returns what its backward op needs only then
  uint32_t entry_count = 0;        // arguments and outputs, including those in lists
};

// Lower bound of the memory of a tensor of these sizes; UINT64_MAX if it overflows.
uint64_t tensor_bytes_min(c10::ArrayRef<int64_t> sizes, uint64_t item_bytes);

// Decodes templates. `allowed_ops` are names without overload, and for ops of torch without namespace.
class TemplateReader {
 public:
  TemplateReader(c10::Device device, std::vector<std::string> allowed_ops);

  // ProtocolError if the body is malformed. For an op that is not allowed, the template has a refusal_reason.
  std::unique_ptr<DecodedTemplate> read(WireReader& body) const;

 private:
  void resolve_op(DecodedTemplate& result, const std::string& name, const std::string& overload) const;

  c10::Device device_;
  std::unordered_set<std::string> allowed_ops_;
};

}  // namespace genie
