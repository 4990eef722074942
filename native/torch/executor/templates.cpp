#include "templates.h"

#include <algorithm>

#include <ATen/ops/zeros.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include "template_checks.h"
#include "failure.h"

namespace genie {

namespace {

using c10::IValue;
using c10::TypeKind;

constexpr uint32_t OP_ARGUMENTS_MAX = 256;
constexpr size_t OP_NAME_BYTES_MAX = 128;
constexpr uint64_t NEW_BYTES_MAX = uint64_t{1} << 62;

// --- format: independent of the op --------------------------------------------------------------

uint32_t read_count(WireReader& in, uint32_t max) {
  uint32_t count = in.read_u32();
  // Each item has at least one byte: a count that exceeds the body is rejected before memory is allocated.
  if (count > max || count > in.remaining()) throw ProtocolError("a template exceeds the maximum size");
  return count;
}

class TemplateBodyReader {
 public:
  TemplateBodyReader(WireReader& in, DecodedTemplate& result, c10::Device device)
      : in_(in), template_(result), device_(device) {}

  void read_arguments() {
    uint32_t count = read_count(in_, OP_ARGUMENTS_MAX);
    for (uint32_t i = 0; i < count; i++) template_.arguments.push_back(read_argument(false));
  }

  void read_outputs() {
    uint8_t predicted = in_.read_u8();
    if (predicted > 1) throw ProtocolError("a template is malformed");
    template_.has_predicted_outputs = predicted != 0;
    if (!template_.has_predicted_outputs) return;
    uint32_t count = read_count(in_, OP_ARGUMENTS_MAX);
    for (uint32_t i = 0; i < count; i++) template_.outputs.push_back(read_output(false));
  }

 private:
  TemplateArgument read_argument(bool in_list) {
    template_.entry_count++;
    TemplateArgument result;
    result.kind = static_cast<ArgumentKind>(in_.read_u8());
    switch (result.kind) {
      case ArgumentKind::None:
        break;
      case ArgumentKind::Tensor:
        read_tensor(result);
        break;
      case ArgumentKind::ScalarTensor:
        read_scalar_tensor(result);
        break;
      case ArgumentKind::Undefined:
        result.constant = at::Tensor();
        break;
      case ArgumentKind::Integer:
        result.constant = in_.read_i64();
        break;
      case ArgumentKind::Boolean:
        result.constant = in_.read_u8() != 0;
        break;
      case ArgumentKind::Float:
        result.constant = in_.read_f64();
        break;
      case ArgumentKind::Complex: {
        double real = in_.read_f64();
        result.constant = c10::complex<double>(real, in_.read_f64());
        break;
      }
      case ArgumentKind::Text:
        result.constant = in_.read_text();
        break;
      case ArgumentKind::List:
        read_list(result, in_list);
        break;
      case ArgumentKind::Device:
        result.constant = device_;
        break;
      case ArgumentKind::Generator:
        template_.call_data_bytes += sizeof(uint32_t);
        break;
      case ArgumentKind::IntegerData:
      case ArgumentKind::FloatData:
        template_.call_data_bytes += sizeof(int64_t);
        break;
      default:
        throw ProtocolError("an argument has an unknown kind");
    }
    return result;
  }

  void read_tensor(TemplateArgument& result) {
    uint8_t dtype = in_.read_u8(), dimensions = in_.read_u8(), flags = in_.read_u8();
    result.has_offset = flags & VIEW_HAS_OFFSET;
    result.meta = std::make_unique<TensorMeta>(read_tensor_meta(in_, dtype, dimensions, flags));
    template_.call_data_bytes += sizeof(uint32_t) + (result.has_offset ? sizeof(int64_t) : 0);
    template_.tensor_argument_count++;
  }

  void read_scalar_tensor(TemplateArgument& result) {
    auto dtype = to_supported_dtype(in_.read_u8());
    result.scalar = at::zeros({}, at::TensorOptions().dtype(dtype).device(c10::kCPU));
    if (in_.read_u8()) result.scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
    template_.call_data_bytes += SCALAR_TENSOR_BYTES;
  }

  void read_list(TemplateArgument& result, bool in_list) {
    if (in_list) throw ProtocolError("a list contains a list");
    uint32_t count = read_count(in_, LIST_ITEMS_MAX);
    result.items.reserve(count);
    for (uint32_t i = 0; i < count; i++) result.items.push_back(read_argument(true));
  }

  ExpectedOutput read_output(bool in_list) {
    template_.entry_count++;
    ExpectedOutput result;
    result.kind = static_cast<OutputKind>(in_.read_u8());
    switch (result.kind) {
      case OutputKind::None:
        break;
      case OutputKind::New: {
        uint8_t dtype = in_.read_u8(), dimensions = in_.read_u8();
        result.meta = read_tensor_meta(in_, dtype, dimensions, 0);
        template_.new_output_count++;
        template_.new_output_bytes += result.meta.span_bytes;
        if (template_.new_output_bytes > NEW_BYTES_MAX)
          throw ProtocolError("the size of the outputs overflows");
        break;
      }
      case OutputKind::Alias:
        result.alias_index = in_.read_u32();
        if (result.alias_index >= template_.tensor_argument_count)
          throw ProtocolError("an output is an alias of an argument that does not exist");
        break;
      case OutputKind::List: {
        if (in_list) throw ProtocolError("a list contains a list");
        uint32_t count = read_count(in_, LIST_ITEMS_MAX);
        result.items.reserve(count);
        for (uint32_t i = 0; i < count; i++) result.items.push_back(read_output(true));
        break;
      }
      case OutputKind::Integer:
        result.integer = in_.read_i64();
        break;
      default:
        throw ProtocolError("an output has a kind that cannot be predicted");
    }
    return result;
  }

  WireReader& in_;
  DecodedTemplate& template_;
  c10::Device device_;
};

// --- check against the schema of the op ---------------------------------------------------------

c10::TypePtr strip_optional_type(const c10::TypePtr& type) {
  auto* optional = type->castRaw<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

c10::TypePtr list_element_type(const c10::TypePtr& type) {
  return type->castRaw<c10::ListType>()->getElementType();
}

bool is_list_type(const c10::TypePtr& type) { return type->kind() == TypeKind::ListType; }

bool is_supported_argument(const c10::TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::TensorType:
    case TypeKind::NumberType:
    case TypeKind::IntType:
    case TypeKind::SymIntType:
    case TypeKind::FloatType:
    case TypeKind::BoolType:
    case TypeKind::StringType:
    case TypeKind::ScalarTypeType:
    case TypeKind::LayoutType:
    case TypeKind::MemoryFormatType:
    case TypeKind::DeviceObjType:
    case TypeKind::GeneratorType:
      return true;
    default:
      return false;
  }
}

bool is_supported_return(const c10::TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::TensorType:
    case TypeKind::NumberType:
    case TypeKind::IntType:
    case TypeKind::SymIntType:
    case TypeKind::FloatType:
    case TypeKind::BoolType:
      return true;
    default:
      return false;
  }
}

void check_schema_types_supported(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    auto type = strip_optional_type(argument.real_type());
    if (is_list_type(type)) type = strip_optional_type(list_element_type(type));
    if (!is_supported_argument(type)) throw OpRefused("it takes a " + argument.real_type()->str());
  }
  for (const auto& returned : schema.returns()) {
    auto type = returned.real_type();
    if (is_list_type(type)) type = list_element_type(type);
    if (!is_supported_return(type)) throw OpRefused("it returns a " + returned.real_type()->str());
  }
}

void set_constant(TemplateArgument& argument, IValue value) {
  argument.constant = std::move(value);
  argument.kind = ArgumentKind::Integer;
}

bool is_constant(const TemplateArgument& argument) { return argument.kind == ArgumentKind::Integer; }

// Converts each argument to the type in the schema, or throws OpRefused.
class ArgumentConverter {
 public:
  // `schema_type` is the type in the schema, `ivalue_type` the type that torch uses in IValues (int for
  // SymInt).
  void convert(TemplateArgument& argument, const c10::TypePtr& schema_type, const c10::TypePtr& ivalue_type,
               bool is_written) {
    if (schema_type->kind() == TypeKind::OptionalType && argument.kind == ArgumentKind::None) {
      set_constant(argument, IValue());
    } else if (is_list_type(strip_optional_type(schema_type))) {
      convert_list(argument, strip_optional_type(schema_type), strip_optional_type(ivalue_type), is_written);
    } else {
      convert_item(argument, *strip_optional_type(schema_type), is_written);
    }
  }

 private:
  void convert_list(TemplateArgument& argument, const c10::TypePtr& schema_type,
                    const c10::TypePtr& ivalue_type, bool is_written) {
    if (argument.kind != ArgumentKind::List) throw OpRefused("expected a " + schema_type->str());
    argument.item_type = list_element_type(ivalue_type);
    bool constant = true;
    for (TemplateArgument& item : argument.items) {
      convert(item, list_element_type(schema_type), argument.item_type, is_written);
      constant = constant && is_constant(item);
    }
    if (!constant) return;
    c10::impl::GenericList list(argument.item_type);
    list.reserve(argument.items.size());
    for (TemplateArgument& item : argument.items) list.push_back(std::move(item.constant));
    set_constant(argument, std::move(list));
    argument.items = std::vector<TemplateArgument>();
  }

  void convert_item(TemplateArgument& argument, const c10::Type& schema_type, bool is_written) {
    if (!try_convert_by_type(argument, schema_type, is_written))
      throw OpRefused("expected a " + schema_type.str());
  }

  bool try_convert_by_type(TemplateArgument& argument, const c10::Type& schema_type, bool is_written) {
    switch (schema_type.kind()) {
      case TypeKind::TensorType:
        return try_convert_tensor(argument, is_written);
      case TypeKind::NumberType:
        return try_convert_number(argument);
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        return try_convert_integer(argument);
      case TypeKind::FloatType:
        return try_convert_float(argument);
      case TypeKind::BoolType:
        return try_convert_constant(argument, ArgumentKind::Boolean);
      case TypeKind::StringType:
        return try_convert_constant(argument, ArgumentKind::Text);
      case TypeKind::DeviceObjType:
        return try_convert_constant(argument, ArgumentKind::Device);
      case TypeKind::GeneratorType:
        return argument.kind == ArgumentKind::Generator;
      case TypeKind::ScalarTypeType:
        return is_allowed_enum_argument(argument, [](int64_t number) {
          return number <= UINT8_MAX && is_supported_dtype(static_cast<c10::ScalarType>(number));
        });
      case TypeKind::LayoutType:
        return is_allowed_enum_argument(
            argument, [](int64_t number) { return number == static_cast<int64_t>(c10::kStrided); });
      case TypeKind::MemoryFormatType:
        return is_allowed_enum_argument(argument, [](int64_t number) {
          return number <= static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d);
        });
      default:
        return false;
    }
  }

  bool try_convert_tensor(TemplateArgument& argument, bool is_written) {
    argument.is_written = is_written;
    switch (argument.kind) {
      case ArgumentKind::Tensor:
        return true;
      case ArgumentKind::ScalarTensor:
        return !is_written;  // the result of the write would be lost
      case ArgumentKind::Undefined:
        set_constant(argument, std::move(argument.constant));
        return true;
      default:
        return false;
    }
  }

  bool try_convert_number(TemplateArgument& argument) {
    switch (argument.kind) {
      case ArgumentKind::Integer:
      case ArgumentKind::Boolean:
      case ArgumentKind::Float:
      case ArgumentKind::Complex:
        set_constant(argument, std::move(argument.constant));
        return true;
      default:
        return argument.kind == ArgumentKind::IntegerData || argument.kind == ArgumentKind::FloatData;
    }
  }

  bool try_convert_integer(TemplateArgument& argument) {
    if (argument.kind == ArgumentKind::Boolean) {
      set_constant(argument, static_cast<int64_t>(argument.constant.toBool()));
    }
    return argument.kind == ArgumentKind::Integer || argument.kind == ArgumentKind::IntegerData;
  }

  bool try_convert_float(TemplateArgument& argument) {
    if (argument.kind == ArgumentKind::Integer) {
      set_constant(argument, static_cast<double>(argument.constant.toInt()));
      return true;
    }
    return try_convert_constant(argument, ArgumentKind::Float) || argument.kind == ArgumentKind::FloatData;
  }

  bool try_convert_constant(TemplateArgument& argument, ArgumentKind kind) {
    if (argument.kind != kind) return false;
    set_constant(argument, std::move(argument.constant));
    return true;
  }

  template <class Allowed>
  bool is_allowed_enum_argument(TemplateArgument& argument, Allowed is_allowed) {
    if (argument.kind != ArgumentKind::Integer) return false;
    int64_t number = argument.constant.toInt();
    return number >= 0 && is_allowed(number);
  }
};

// Arguments that the client cannot set: unchecked indices and pinned memory.
bool is_argument_fixed_by_executor(const c10::Argument& argument) {
  return argument.name() == "unsafe" || argument.name() == "pin_memory";
}

bool overlaps_itself(const TemplateArgument& argument) {
  for (size_t i = 0; argument.meta && i < argument.meta->sizes.size(); i++)
    if (argument.meta->sizes[i] > 1 && argument.meta->strides[i] == 0) return true;
  return std::any_of(argument.items.begin(), argument.items.end(), overlaps_itself);
}

// Arguments of attention that are tensors in the schema, but undefined without dropout or bias.
bool may_be_undefined(const c10::Argument& argument) {
  static const std::unordered_set<std::string> names = {
      "attn_bias", "cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset", "rng_state", "unused"};
  return argument.real_type()->kind() != TypeKind::TensorType || names.count(argument.name());
}

void convert_arguments(DecodedTemplate& result) {
  const auto& schema = result.op->schema();
  const auto& declared = schema.arguments();
  if (result.arguments.size() != declared.size()) {
    throw OpRefused("it takes " + std::to_string(declared.size()) + " arguments, not " +
                    std::to_string(result.arguments.size()));
  }
  ArgumentConverter converter;
  for (size_t i = 0; i < declared.size(); i++) {
    bool written = declared[i].alias_info() && declared[i].alias_info()->isWrite();
    try {
      converter.convert(result.arguments[i], declared[i].real_type(), declared[i].type(), written);
      const IValue& constant = result.arguments[i].constant;
      if (constant.isTensor() && !constant.toTensor().defined() && !may_be_undefined(declared[i]))
        throw OpRefused("it must be defined");
      if (declared[i].is_out() && overlaps_itself(result.arguments[i]))
        throw OpRefused("more than one element of the output is at the same place in memory");
    } catch (const OpRefused& error) {
      throw OpRefused("argument '" + declared[i].name() + "': " + error.what());
    }
    if (is_argument_fixed_by_executor(declared[i]) && is_constant(result.arguments[i])) {
      bool optional = declared[i].type()->kind() == TypeKind::OptionalType;
      result.arguments[i].constant = optional ? IValue() : IValue(false);
    }
  }
  if (result.has_predicted_outputs && result.outputs.size() != schema.returns().size()) {
    throw OpRefused("it returns " + std::to_string(schema.returns().size()) + " values, not " +
                    std::to_string(result.outputs.size()));
  }
}

// Index of the argument `size` of an op that creates a tensor; -1 if there is none.
int find_size_argument(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return -1;  // a view allocates no memory
  }
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    if (argument.name() == "size" && is_list_type(argument.type()) &&
        list_element_type(argument.type())->kind() == TypeKind::IntType) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void set_output_bytes_min(DecodedTemplate& result) {
  result.size_argument_index = find_size_argument(result.op->schema());
  if (result.size_argument_index < 0) return;
  const TemplateArgument& size = result.arguments[static_cast<size_t>(result.size_argument_index)];
  if (!is_constant(size)) return;
  result.size_argument_index = -1;
  // The first tensor argument, if any, has the dtype of the result; else assume one byte.
  const auto& first = result.arguments[0].meta;
  if (size.constant.isIntList()) {
    result.output_bytes_min = tensor_bytes_min(size.constant.toIntVector(), first ? first->item_bytes : 1);
  }
}

}  // namespace

uint64_t tensor_bytes_min(c10::ArrayRef<int64_t> sizes, uint64_t item_bytes) {
  uint64_t bytes = item_bytes;
  for (int64_t size : sizes) {
    if (size <= 0) return 0;  // empty, or inferred (-1)
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) bytes = UINT64_MAX;
  }
  return bytes;
}

TemplateReader::TemplateReader(c10::Device device, std::vector<std::string> allowed_ops)
    : device_(device),
      allowed_ops_(std::make_move_iterator(allowed_ops.begin()), std::make_move_iterator(allowed_ops.end())) {
}

std::unique_ptr<DecodedTemplate> TemplateReader::read(WireReader& body) const {
  auto result = std::make_unique<DecodedTemplate>();
  std::string name = body.read_text(), overload = body.read_text();
  if (name.size() > OP_NAME_BYTES_MAX || overload.size() > OP_NAME_BYTES_MAX) {
    throw ProtocolError("the name of an op is longer than allowed");
  }
  result->name = overload.empty() ? name : name + "." + overload;
  TemplateBodyReader reader(body, *result, device_);
  reader.read_arguments();
  reader.read_outputs();
  if (body.remaining() != 0) throw ProtocolError("a template has trailing bytes");
  try {
    resolve_op(*result, name, overload);
  } catch (const OpRefused& error) {
    result->op.reset();
    result->refusal_reason = result->name + " is not allowed on an executor: " + error.what();
  }
  return result;
}

void TemplateReader::resolve_op(DecodedTemplate& result, const std::string& name,
                                const std::string& overload) const {
  constexpr std::string_view NAMESPACE = "aten::";
  // Ops of other libraries are allowed by their name with its namespace.
  std::string allowed_name = name.rfind(NAMESPACE, 0) == 0 ? name.substr(NAMESPACE.size()) : name;
  if (!allowed_ops_.count(allowed_name)) {
    throw OpRefused("it is not in the list of allowed ops (docs/DEVICE.md, \"Not supported\")");
  }
  result.op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!result.op) throw OpRefused("this version of torch does not have it");
  check_schema_types_supported(result.op->schema());
  convert_arguments(result);
  check_template(result, device_);
  result.runs_in_grad_mode = name == "aten::mkldnn_rnn_layer";
  set_output_bytes_min(result);
  result.argument_check = find_argument_check(allowed_name);
}

}  // namespace genie
