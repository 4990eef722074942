// See template_body.h.
#include "template_body.h"

#include <ATen/core/Tensor.h>

#include "device_type.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

void write_argument(WireWriter& out, const IValue& value, bool numbers_as_data, bool float_as_data);

void write_tensor_argument(WireWriter& out, const Tensor& tensor) {
  if (!tensor.defined()) {
    out.write_u8(static_cast<uint8_t>(ArgumentKind::Undefined));
  } else if (tensor.device().type() == DEVICE_TYPE) {
    out.write_u8(static_cast<uint8_t>(ArgumentKind::Tensor));
    out.write_u8(static_cast<uint8_t>(tensor.scalar_type()));
    out.write_u8(static_cast<uint8_t>(tensor.dim()));
    out.write_u8((tensor.storage_offset() ? VIEW_HAS_OFFSET : 0) | (tensor.is_conj() ? VIEW_CONJUGATE : 0) |
                 (tensor.is_neg() ? VIEW_NEGATIVE : 0));
    for (int64_t size : tensor.sizes()) out.write_i64(size);
    for (int64_t stride : tensor.strides()) out.write_i64(stride);
  } else {
    out.write_u8(static_cast<uint8_t>(ArgumentKind::ScalarTensor));
    out.write_u8(static_cast<uint8_t>(tensor.scalar_type()));
    out.write_u8(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  }
}

void write_argument(WireWriter& out, const IValue& value, bool numbers_as_data, bool float_as_data) {
  auto kind = [&](ArgumentKind kind) { out.write_u8(static_cast<uint8_t>(kind)); };
  if (value.isTensor()) {
    write_tensor_argument(out, value.toTensor());
  } else if (value.isInt()) {
    kind(numbers_as_data ? ArgumentKind::IntegerData : ArgumentKind::Integer);
    if (!numbers_as_data) out.write_i64(value.toInt());
  } else if (value.isNone()) {
    kind(ArgumentKind::None);
  } else if (value.isDouble()) {
    kind(float_as_data ? ArgumentKind::FloatData : ArgumentKind::Float);
    if (!float_as_data) out.write_f64(value.toDouble());
  } else if (value.isBool()) {
    kind(ArgumentKind::Boolean);
    out.write_u8(value.toBool());
  } else if (value.isList()) {
    kind(ArgumentKind::List);
    auto items = value.toListRef();
    out.write_u32(static_cast<uint32_t>(items.size()));
    for (const IValue& item : items) write_argument(out, item, numbers_as_data, numbers_as_data);
  } else if (value.isDevice()) {
    kind(ArgumentKind::Device);
  } else if (value.isString()) {
    kind(ArgumentKind::Text);
    out.write_text(value.toStringRef());
  } else if (value.isSymInt()) {
    kind(ArgumentKind::Integer);
    out.write_i64(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else if (value.isComplexDouble()) {
    kind(ArgumentKind::Complex);
    out.write_f64(value.toComplexDouble().real());
    out.write_f64(value.toComplexDouble().imag());
  } else {
    kind(ArgumentKind::Generator);
  }
}

void write_output_spec(WireWriter& out, const OutputSpec& output) {
  out.write_u8(static_cast<uint8_t>(output.kind));
  if (output.kind == OutputKind::New) {
    out.write_u8(static_cast<uint8_t>(output.dtype));
    out.write_u8(static_cast<uint8_t>(output.sizes.size()));
    for (int64_t size : output.sizes) out.write_i64(size);
    for (int64_t stride : output.strides) out.write_i64(stride);
  } else if (output.kind == OutputKind::Alias) {
    out.write_u32(static_cast<uint32_t>(output.source_input_index));
  } else if (output.kind == OutputKind::List) {
    out.write_u32(static_cast<uint32_t>(output.items.size()));
    for (const OutputSpec& item : output.items) write_output_spec(out, item);
  } else if (output.kind == OutputKind::Integer) {
    out.write_i64(output.constant.toInt());
  }
}

}  // namespace

WireWriter encode_template_body(const c10::OperatorHandle& op, const OpTraits& traits, const Stack& stack,
                                size_t first_argument, const std::vector<OutputSpec>* outputs) {
  WireWriter body;
  body.write_text(op.schema().name());
  body.write_text(op.schema().overload_name());
  body.write_u32(static_cast<uint32_t>(traits.argument_count));
  for (size_t i = 0; i < traits.argument_count; i++) {
    write_argument(body, stack[first_argument + i], traits.has_numbers[i] && traits.sends_numbers_as_data,
                   traits.sends_numbers_as_data);
  }
  body.write_u8(outputs != nullptr);
  if (outputs) {
    body.write_u32(static_cast<uint32_t>(outputs->size()));
    for (const OutputSpec& output : *outputs) write_output_spec(body, output);
  }
  return body;
}

void write_define_template(WireWriter& records, uint32_t number, const WireWriter& body) {
  records.begin_record(RecordKind::DefineTemplate, number);
  records.write_u32(static_cast<uint32_t>(body.size()));
  records.append_bytes(body.data(), body.size());
}

}  // namespace genie
