#include "python_compiler.h"

#include <cstring>
#include <tuple>

#include <ATen/ops/empty_strided.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace genie {

namespace {

namespace py = pybind11;
using c10::IValue;
using c10::TypeKind;

py::tuple to_int_tuple(c10::IntArrayRef values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); i++) result[i] = py::int_(values[i]);
  return result;
}

const c10::Type& strip_optional_type_ref(const c10::Type& type) {
  auto* optional = type.castRaw<c10::OptionalType>();
  return optional ? *optional->getElementType() : type;
}

// Converts steps to Python values; genie/native/graph_steps.py documents the format.
class PythonStepBuilder {
 public:
  py::list build_step_tuples(const std::vector<GraphStep>& steps) {
    py::list converted;
    for (const GraphStep& step : steps) {
      if (step.kind == RecordKind::Op) {
        converted.append(build_op_tuple(step));
      } else if (step.kind == RecordKind::Allocate) {
        converted.append(py::make_tuple("allocate", step.storage, step.allocated_bytes));
      } else if (step.kind == RecordKind::Settings) {
        throw OpRefused("PyTorch settings change within it");
      } else {
        converted.append(py::make_tuple("free", step.storage));
      }
    }
    return converted;
  }

 private:
  py::object build_op_tuple(const GraphStep& step) {
    const DecodedTemplate& op_template = *step.op_template;
    if (!op_template.op) throw OpRefused(op_template.refusal_reason);
    const auto& schema = op_template.op->schema();
    check_shapes(op_template, step.record.data());
    const uint8_t* data = step.record.data();
    py::list arguments;
    for (size_t i = 0; i < op_template.arguments.size(); i++)
      arguments.append(
          build_argument_tuple(op_template.arguments[i], data, *schema.arguments()[i].real_type()));
    new_storages_ = step.record.data() + op_template.call_data_bytes;
    py::list outputs;
    for (const ExpectedOutput& each : op_template.outputs) outputs.append(build_output_tuple(each));
    return py::make_tuple("op", schema.name(), schema.overload_name(), arguments, outputs);
  }

  // Compiled code does not pass through the checks of each call.
  static void check_shapes(const DecodedTemplate& op_template, const uint8_t* call_data) {
    if (!op_template.argument_check) return;
    std::vector<c10::IValue> arguments;
    for (const TemplateArgument& argument : op_template.arguments)
      arguments.push_back(build_meta_value(argument, call_data));
    check_arguments(op_template.argument_check, op_template.op->schema(), arguments);
  }

  // The argument, with tensors on the meta device.
  static c10::IValue build_meta_value(const TemplateArgument& argument, const uint8_t*& call_data) {
    switch (argument.kind) {
      case ArgumentKind::Tensor: {
        call_data += sizeof(uint32_t) + (argument.has_offset ? sizeof(int64_t) : 0);
        auto options = at::TensorOptions().dtype(argument.meta->dtype).device(c10::kMeta);
        return at::empty_strided(argument.meta->sizes, argument.meta->strides, options);
      }
      case ArgumentKind::ScalarTensor:
        call_data += SCALAR_TENSOR_BYTES;
        return argument.scalar;
      case ArgumentKind::IntegerData:
        return read_next_value<int64_t>(call_data);
      case ArgumentKind::FloatData:
        return read_next_value<double>(call_data);
      case ArgumentKind::Generator:
        call_data += sizeof(uint32_t);
        return c10::IValue();
      case ArgumentKind::List: {
        c10::impl::GenericList list(argument.item_type);
        for (const TemplateArgument& item : argument.items) list.push_back(build_meta_value(item, call_data));
        return list;
      }
      default:
        return argument.constant;
    }
  }

  py::object build_argument_tuple(const TemplateArgument& argument, const uint8_t*& call_data,
                                  const c10::Type& declared) {
    const c10::Type& type = strip_optional_type_ref(declared);
    switch (argument.kind) {
      case ArgumentKind::Tensor: {
        auto storage = read_next_value<uint32_t>(call_data);
        int64_t offset = argument.has_offset ? read_next_value<int64_t>(call_data) : 0;
        return build_tensor_tuple(storage, *argument.meta, offset, argument.is_written);
      }
      case ArgumentKind::ScalarTensor:
        return build_scalar_tuple(argument, call_data);
      case ArgumentKind::IntegerData:
        return py::make_tuple("value", read_next_value<int64_t>(call_data));
      case ArgumentKind::FloatData:
        return py::make_tuple("value", read_next_value<double>(call_data));
      case ArgumentKind::Generator:
        call_data += sizeof(uint32_t);
        return py::make_tuple("generator");
      case ArgumentKind::List: {
        py::list items;
        const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
        for (const TemplateArgument& item : argument.items)
          items.append(build_argument_tuple(item, call_data, element));
        return py::make_tuple("list", items);
      }
      default:
        return py::make_tuple("value", constant_to_python(argument.constant, type));
    }
  }

  py::object build_tensor_tuple(uint32_t storage, const TensorMeta& meta, int64_t offset, bool is_written) {
    if (meta.flags) throw OpRefused("a tensor has a lazy conjugate or negative bit");
    return py::make_tuple("tensor", storage, py::cast(meta.dtype), to_int_tuple(meta.sizes),
                          to_int_tuple(meta.strides), offset, is_written);
  }

  py::object build_scalar_tuple(const TemplateArgument& argument, const uint8_t*& call_data) {
    at::Tensor filled = argument.scalar.clone();
    std::memcpy(filled.mutable_data_ptr(), call_data, filled.itemsize());
    call_data += SCALAR_TENSOR_BYTES;
    bool wrapped = argument.scalar.unsafeGetTensorImpl()->is_wrapped_number();
    return py::make_tuple("scalar", py::cast(filled.item()), py::cast(filled.scalar_type()), wrapped);
  }

  // Dtypes, layouts and memory formats are integers in the template; the schema has the type.
  py::object constant_to_python(const IValue& value, const c10::Type& type) {
    if (value.isNone()) return py::none();
    if (value.isList()) {
      py::list items;
      const c10::Type& element = strip_optional_type_ref(*type.castRaw<c10::ListType>()->getElementType());
      for (const IValue& item : value.toListRef()) items.append(constant_to_python(item, element));
      return items;
    }
    if (value.isInt()) {
      switch (type.kind()) {
        case TypeKind::ScalarTypeType:
          return py::cast(static_cast<c10::ScalarType>(value.toInt()));
        case TypeKind::LayoutType:
          return py::module_::import("torch").attr("strided");  // the only supported layout
        case TypeKind::MemoryFormatType:
          return py::cast(static_cast<c10::MemoryFormat>(value.toInt()));
        default:
          return py::int_(value.toInt());
      }
    }
    if (value.isBool()) return py::bool_(value.toBool());
    if (value.isDouble()) return py::float_(value.toDouble());
    if (value.isString()) return py::str(value.toStringRef());
    if (value.isDevice()) return py::cast(value.toDevice());
    if (value.isComplexDouble()) {
      auto number = value.toComplexDouble();
      return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(number.real(), number.imag()));
    }
    if (value.isTensor() && !value.toTensor().defined()) return py::none();
    throw OpRefused("an argument is a " + value.tagKind());
  }

  py::object build_output_tuple(const ExpectedOutput& output) {
    switch (output.kind) {
      case OutputKind::New:
        return py::make_tuple("new", read_next_value<uint32_t>(new_storages_), py::cast(output.meta.dtype),
                              to_int_tuple(output.meta.sizes), to_int_tuple(output.meta.strides));
      case OutputKind::List: {
        py::list items;
        for (const ExpectedOutput& item : output.items) items.append(build_output_tuple(item));
        return py::make_tuple("list", items);
      }
      default:
        return py::make_tuple("nothing");
    }
  }

  const uint8_t* new_storages_ = nullptr;
};

// Converts (storage, dtype, sizes, strides, offset) and validates it like a View from the wire.
StorageView storage_view_from_python(py::handle fields) {
  using IntegerVector = std::vector<int64_t>;
  auto [storage, dtype, sizes, strides, offset] =
      fields.cast<std::tuple<uint32_t, at::ScalarType, IntegerVector, IntegerVector, int64_t>>();
  WireWriter dimensions;
  for (int64_t each : sizes) dimensions.write_i64(each);
  for (int64_t each : strides) dimensions.write_i64(each);
  WireReader in(dimensions.data(), dimensions.size());
  StorageView view;
  view.storage = storage;
  view.offset = offset;
  view.meta = read_tensor_meta(in, static_cast<uint8_t>(dtype), static_cast<uint8_t>(sizes.size()), 0);
  return view;
}

class PythonGraphCompiler final : public GraphCompiler {
 public:
  explicit PythonGraphCompiler(py::object object) : object_(std::move(object)) {}
  ~PythonGraphCompiler() override {
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }

  CompiledGraph compile(const std::vector<GraphStep>& steps, const std::vector<uint32_t>& result_storages,
                        const std::unordered_map<uint32_t, uint64_t>& storage_bytes,
                        const std::function<void()>& keep_alive) override {
    py::gil_scoped_acquire gil;
    try {
      py::cpp_function callback([&keep_alive] {
        py::gil_scoped_release release;
        keep_alive();
      });
      py::object compiled_function = object_.attr("compile")(PythonStepBuilder().build_step_tuples(steps),
                                                             result_storages, storage_bytes, callback);
      CompiledGraph compiled;
      for (py::handle each : compiled_function.attr("inputs"))
        compiled.inputs.push_back(storage_view_from_python(each));
      for (py::handle each : compiled_function.attr("results")) {
        compiled.results.push_back(storage_view_from_python(each));
        compiled.result_bytes += compiled.results.back().meta.span_bytes;
      }
      compiled.function = {compiled_function.release().ptr(), [](void* held) {
                             py::gil_scoped_acquire gil;
                             Py_DECREF(static_cast<PyObject*>(held));
                           }};
      return compiled;
    } catch (const py::error_already_set& error) {
      throw OpRefused(py::str(error.value()).cast<std::string>());
    } catch (const py::cast_error& error) {
      throw OpRefused(error.what());
    }
  }

  std::vector<at::Tensor> run(void* compiled_function, const std::vector<at::Tensor>& inputs) override {
    py::gil_scoped_acquire gil;
    py::list arguments;
    for (const at::Tensor& input : inputs) arguments.append(py::cast(input));
    try {
      py::object results = py::handle(static_cast<PyObject*>(compiled_function))(arguments);
      return results.cast<std::vector<at::Tensor>>();
    } catch (const py::error_already_set& error) {
      throw_python_error(error);
    }
  }

 private:
  py::object object_;
};

}  // namespace

void throw_python_error(const py::error_already_set& error) {
  auto message = py::str(error.value()).cast<std::string>();
  auto torch = py::module_::import("torch");
  if (error.matches(torch.attr("AcceleratorError"))) throw AcceleratorFailed(message);
  if (error.matches(torch.attr("OutOfMemoryError")) || error.matches(PyExc_MemoryError))
    throw QuotaExceeded(message);
  throw std::runtime_error(message);
}

std::shared_ptr<GraphCompiler> make_python_compiler(py::object object) {
  return std::make_shared<PythonGraphCompiler>(std::move(object));
}

}  // namespace genie
