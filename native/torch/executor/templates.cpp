#include "templates.h"

#include <ATen/ops/zeros.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include "failure.h"

namespace genie {

namespace {

using c10::IValue;
using c10::TypeKind;

constexpr uint32_t ARGUMENTS_MAX = 256;
constexpr size_t NAME_BYTES_MAX = 128;
constexpr uint64_t NEW_BYTES_MAX = uint64_t{1} << 62;

// --- the form: nothing is asked about the op yet ------------------------------------------------

uint32_t read_count(Reader& in, uint32_t most) {
  uint32_t count = in.u32();
  // Each takes at least a byte, so a count beyond the body costs no memory.
  if (count > most || count > in.left()) throw ProtocolError("a template holds more than is allowed");
  return count;
}

class BodyReader {
 public:
  BodyReader(Reader& in, Template& made, c10::Device device) : in_(in), made_(made), device_(device) {}

  void read_arguments() {
    uint32_t count = read_count(in_, ARGUMENTS_MAX);
    for (uint32_t i = 0; i < count; i++) made_.arguments.push_back(argument(false));
  }

  void read_outputs() {
    uint8_t predicted = in_.u8();
    if (predicted > 1) throw ProtocolError("a template is malformed");
    made_.predicted = predicted != 0;
    if (!made_.predicted) return;
    uint32_t count = read_count(in_, ARGUMENTS_MAX);
    for (uint32_t i = 0; i < count; i++) made_.outputs.push_back(output(false));
  }

 private:
  Argument argument(bool in_list) {
    made_.nodes++;
    Argument made;
    made.kind = static_cast<ArgumentKind>(in_.u8());
    switch (made.kind) {
      case ArgumentKind::None:
        break;
      case ArgumentKind::Tensor:
        tensor(made);
        break;
      case ArgumentKind::ScalarTensor:
        scalar_tensor(made);
        break;
      case ArgumentKind::Undefined:
        made.constant = at::Tensor();
        break;
      case ArgumentKind::Integer:
        made.constant = in_.i64();
        break;
      case ArgumentKind::Boolean:
        made.constant = in_.u8() != 0;
        break;
      case ArgumentKind::Float:
        made.constant = in_.f64();
        break;
      case ArgumentKind::Complex: {
        double real = in_.f64();
        made.constant = c10::complex<double>(real, in_.f64());
        break;
      }
      case ArgumentKind::Text:
        made.constant = in_.text();
        break;
      case ArgumentKind::List:
        list(made, in_list);
        break;
      case ArgumentKind::OwnDevice:
        made.constant = device_;
        break;
      case ArgumentKind::Generator:
        made_.data_bytes += sizeof(uint32_t);
        break;
      case ArgumentKind::IntegerData:
      case ArgumentKind::FloatData:
        made_.data_bytes += sizeof(int64_t);
        break;
      default:
        throw ProtocolError("an argument is of an unknown kind");
    }
    return made;
  }

  void tensor(Argument& made) {
    uint8_t dtype = in_.u8(), dimensions = in_.u8(), flags = in_.u8();
    made.has_offset = flags & VIEW_HAS_OFFSET;
    made.look = std::make_unique<Look>(read_look(in_, dtype, dimensions, flags));
    made_.data_bytes += sizeof(uint32_t) + (made.has_offset ? sizeof(int64_t) : 0);
    made_.tensors++;
  }

  void scalar_tensor(Argument& made) {
    auto dtype = checked_dtype(in_.u8());
    made.scalar = at::zeros({}, at::TensorOptions().dtype(dtype).device(c10::kCPU));
    if (in_.u8()) made.scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
    made_.data_bytes += SCALAR_BYTES;
  }

  void list(Argument& made, bool in_list) {
    if (in_list) throw ProtocolError("a list holds a list");
    uint32_t count = read_count(in_, LIST_ITEMS_MAX);
    made.items.reserve(count);
    for (uint32_t i = 0; i < count; i++) made.items.push_back(argument(true));
  }

  Output output(bool in_list) {
    made_.nodes++;
    Output made;
    made.kind = static_cast<OutputKind>(in_.u8());
    switch (made.kind) {
      case OutputKind::None:
        break;
      case OutputKind::New: {
        uint8_t dtype = in_.u8(), dimensions = in_.u8();
        made.look = read_look(in_, dtype, dimensions, 0);
        made_.new_outputs++;
        made_.new_bytes += made.look.span_bytes;
        if (made_.new_bytes > NEW_BYTES_MAX) throw ProtocolError("outputs are larger than can be counted");
        break;
      }
      case OutputKind::Same:
        made.index = in_.u32();
        if (made.index >= made_.tensors) throw ProtocolError("an output is a tensor that is not given");
        break;
      case OutputKind::List: {
        if (in_list) throw ProtocolError("a list holds a list");
        uint32_t count = read_count(in_, LIST_ITEMS_MAX);
        made.items.reserve(count);
        for (uint32_t i = 0; i < count; i++) made.items.push_back(output(true));
        break;
      }
      case OutputKind::Integer:
        made.integer = in_.i64();
        break;
      default:
        throw ProtocolError("an output is of a kind that cannot be predicted");
    }
    return made;
  }

  Reader& in_;
  Template& made_;
  c10::Device device_;
};

// --- the fit: what the op declares --------------------------------------------------------------

c10::TypePtr without_optional(const c10::TypePtr& type) {
  auto* optional = type->castRaw<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

c10::TypePtr element_of(const c10::TypePtr& type) { return type->castRaw<c10::ListType>()->getElementType(); }

bool is_list(const c10::TypePtr& type) { return type->kind() == TypeKind::ListType; }

bool is_data(const c10::TypePtr& type) {
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

bool is_returned_data(const c10::TypePtr& type) {
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

void check_schema(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    auto type = without_optional(argument.real_type());
    if (is_list(type)) type = without_optional(element_of(type));
    if (!is_data(type)) throw Refused("it takes a " + argument.real_type()->str());
  }
  for (const auto& returned : schema.returns()) {
    auto type = returned.real_type();
    if (is_list(type)) type = element_of(type);
    if (!is_returned_data(type)) throw Refused("it returns a " + returned.real_type()->str());
  }
}

void fix(Argument& argument, IValue value) {
  argument.constant = std::move(value);
  argument.kind = ArgumentKind::Integer;
}

bool is_constant(const Argument& argument) { return argument.kind == ArgumentKind::Integer; }

// Turns each argument into what the op's kernel is given, or throws Refused.
class Fitter {
 public:
  // `real` is what the op declares, `fake` how torch spells that type inside values.
  void fit(Argument& argument, const c10::TypePtr& real, const c10::TypePtr& fake, bool written) {
    if (real->kind() == TypeKind::OptionalType && argument.kind == ArgumentKind::None) {
      fix(argument, IValue());
    } else if (is_list(without_optional(real))) {
      fit_list(argument, without_optional(real), without_optional(fake), written);
    } else {
      fit_item(argument, *without_optional(real), written);
    }
  }

 private:
  void fit_list(Argument& argument, const c10::TypePtr& real, const c10::TypePtr& fake, bool written) {
    if (argument.kind != ArgumentKind::List) throw Refused("something else stands for a " + real->str());
    argument.item_type = element_of(fake);
    bool constant = true;
    for (Argument& item : argument.items) {
      fit(item, element_of(real), argument.item_type, written);
      constant = constant && is_constant(item);
    }
    if (!constant) return;
    c10::impl::GenericList list(argument.item_type);
    list.reserve(argument.items.size());
    for (Argument& item : argument.items) list.push_back(std::move(item.constant));
    fix(argument, std::move(list));
    argument.items = std::vector<Argument>();
  }

  void fit_item(Argument& argument, const c10::Type& real, bool written) {
    if (!fit_kind(argument, real, written)) throw Refused("something else stands for a " + real.str());
  }

  bool fit_kind(Argument& argument, const c10::Type& real, bool written) {
    switch (real.kind()) {
      case TypeKind::TensorType:
        return fit_tensor(argument, written);
      case TypeKind::NumberType:
        return fit_number(argument);
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        return fit_integer(argument);
      case TypeKind::FloatType:
        return fit_float(argument);
      case TypeKind::BoolType:
        return fit_constant(argument, ArgumentKind::Boolean);
      case TypeKind::StringType:
        return fit_constant(argument, ArgumentKind::Text);
      case TypeKind::DeviceObjType:
        return fit_constant(argument, ArgumentKind::OwnDevice);
      case TypeKind::GeneratorType:
        return argument.kind == ArgumentKind::Generator;
      case TypeKind::ScalarTypeType:
        return fit_number_of(argument, [](int64_t number) {
          return number <= UINT8_MAX && is_carried(static_cast<c10::ScalarType>(number));
        });
      case TypeKind::LayoutType:
        return fit_number_of(argument,
                             [](int64_t number) { return number == static_cast<int64_t>(c10::kStrided); });
      case TypeKind::MemoryFormatType:
        return fit_number_of(argument, [](int64_t number) {
          return number <= static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d);
        });
      default:
        return false;
    }
  }

  bool fit_tensor(Argument& argument, bool written) {
    argument.written = written;
    switch (argument.kind) {
      case ArgumentKind::Tensor:
        return true;
      case ArgumentKind::ScalarTensor:
        return !written;  // what an op writes there would never be seen
      case ArgumentKind::Undefined:
        fix(argument, std::move(argument.constant));
        return true;
      default:
        return false;
    }
  }

  bool fit_number(Argument& argument) {
    switch (argument.kind) {
      case ArgumentKind::Integer:
      case ArgumentKind::Boolean:
      case ArgumentKind::Float:
      case ArgumentKind::Complex:
        fix(argument, std::move(argument.constant));
        return true;
      default:
        return argument.kind == ArgumentKind::IntegerData || argument.kind == ArgumentKind::FloatData;
    }
  }

  bool fit_integer(Argument& argument) {
    if (argument.kind == ArgumentKind::Boolean) {
      fix(argument, static_cast<int64_t>(argument.constant.toBool()));
    }
    return argument.kind == ArgumentKind::Integer || argument.kind == ArgumentKind::IntegerData;
  }

  bool fit_float(Argument& argument) {
    if (argument.kind == ArgumentKind::Integer) {
      fix(argument, static_cast<double>(argument.constant.toInt()));
      return true;
    }
    return fit_constant(argument, ArgumentKind::Float) || argument.kind == ArgumentKind::FloatData;
  }

  bool fit_constant(Argument& argument, ArgumentKind kind) {
    if (argument.kind != kind) return false;
    fix(argument, std::move(argument.constant));
    return true;
  }

  template <class Allowed>
  bool fit_number_of(Argument& argument, Allowed allowed) {
    if (argument.kind != ArgumentKind::Integer) return false;
    int64_t number = argument.constant.toInt();
    return number >= 0 && allowed(number);
  }
};

// Arguments that are never heeded: an index that is not checked, memory that cannot be paged out.
bool is_ignored(const c10::Argument& declared) {
  return declared.name() == "unsafe" || declared.name() == "pin_memory";
}

void fit_arguments(Template& made) {
  const auto& schema = made.op->schema();
  const auto& declared = schema.arguments();
  if (made.arguments.size() != declared.size()) {
    throw Refused("it takes " + std::to_string(declared.size()) + " arguments, not " +
                  std::to_string(made.arguments.size()));
  }
  Fitter fitter;
  for (size_t i = 0; i < declared.size(); i++) {
    bool written = declared[i].alias_info() && declared[i].alias_info()->isWrite();
    try {
      fitter.fit(made.arguments[i], declared[i].real_type(), declared[i].type(), written);
    } catch (const Refused& error) {
      throw Refused("argument '" + declared[i].name() + "': " + error.what());
    }
    if (is_ignored(declared[i]) && is_constant(made.arguments[i])) {
      bool optional = declared[i].type()->kind() == TypeKind::OptionalType;
      made.arguments[i].constant = optional ? IValue() : IValue(false);
    }
  }
  if (made.predicted && made.outputs.size() != schema.returns().size()) {
    throw Refused("it returns " + std::to_string(schema.returns().size()) + " values, not " +
                  std::to_string(made.outputs.size()));
  }
}

// The argument named `size` of an op that makes a tensor of that size.
int find_size_argument(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return -1;  // a view takes no memory
  }
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    if (argument.name() == "size" && is_list(argument.type()) &&
        element_of(argument.type())->kind() == TypeKind::IntType) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void note_announced(Template& made) {
  made.size_argument = find_size_argument(made.op->schema());
  if (made.size_argument < 0) return;
  const Argument& size = made.arguments[static_cast<size_t>(made.size_argument)];
  if (!is_constant(size)) return;
  made.size_argument = -1;
  // What is given, if anything, has the dtype of the result; else a byte is the least.
  const auto& first = made.arguments[0].look;
  if (size.constant.isIntList()) {
    made.announced_bytes = announced_bytes(size.constant.toIntVector(), first ? first->item_bytes : 1);
  }
}

}  // namespace

uint64_t announced_bytes(c10::ArrayRef<int64_t> sizes, uint64_t item_bytes) {
  uint64_t bytes = item_bytes;
  for (int64_t size : sizes) {
    if (size <= 0) return 0;  // nothing, or as much as something else has
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) bytes = UINT64_MAX;
  }
  return bytes;
}

TemplateReader::TemplateReader(c10::Device device, std::vector<std::string> allowed_ops)
    : device_(device),
      allowed_(std::make_move_iterator(allowed_ops.begin()), std::make_move_iterator(allowed_ops.end())) {}

std::unique_ptr<Template> TemplateReader::read(Reader& body) const {
  auto made = std::make_unique<Template>();
  std::string name = body.text(), overload = body.text();
  if (name.size() > NAME_BYTES_MAX || overload.size() > NAME_BYTES_MAX) {
    throw ProtocolError("the name of an op is longer than allowed");
  }
  made->name = overload.empty() ? name : name + "." + overload;
  BodyReader reader(body, *made, device_);
  reader.read_arguments();
  reader.read_outputs();
  if (body.left() != 0) throw ProtocolError("a template is longer than what it says");
  try {
    check(*made, name, overload);
  } catch (const Refused& error) {
    made->op.reset();
    made->refusal = made->name + " is not allowed on an executor: " + error.what();
  }
  return made;
}

void TemplateReader::check(Template& made, const std::string& name, const std::string& overload) const {
  constexpr std::string_view NAMESPACE = "aten::";
  if (name.rfind(NAMESPACE, 0) != 0 || !allowed_.count(name.substr(NAMESPACE.size()))) {
    throw Refused("it is not on the list (docs/DEVICE.md, \"What is not there\")");
  }
  made.op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!made.op) throw Refused("this torch does not have it");
  check_schema(made.op->schema());
  fit_arguments(made);
  note_announced(made);
}

}  // namespace genie
