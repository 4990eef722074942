#include "op_runner.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace genie {

namespace {

using c10::IValue;

uint32_t read_storage_number(const uint8_t* storage_numbers, uint32_t index) {
  const uint8_t* position = storage_numbers + sizeof(uint32_t) * index;
  return read_next_value<uint32_t>(position);
}

// Whether this is the only reference to the tensor and to its memory.
bool owns_whole_storage(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.unsafeGetTensorImpl()->unsafe_storage().use_count() == 1;
}

void check_supported_result(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided || !is_supported_dtype(tensor.scalar_type()) ||
      tensor.dim() > static_cast<int64_t>(DIMENSIONS_MAX)) {
    throw OpRefused("the result is an unsupported tensor: " +
                    describe_tensor(tensor.scalar_type(), tensor.sizes()));
  }
  if (!tensor._is_zerotensor() && storage_end_bytes(tensor) > tensor.storage().nbytes()) {
    throw OpRefused("the result exceeds the memory of its storage");
  }
}

uint64_t total_storage_bytes(const std::vector<at::Tensor>& tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.storage().nbytes();
  return bytes;
}

}  // namespace

// --- calls --------------------------------------------------------------------------------------

void OpRunner::invoke_op(DecodedTemplate& op_template, const uint8_t* call_data) {
  if (!op_template.op) throw OpRefused(op_template.refusal_reason);
  storages_.check_quota(std::max(op_template.new_output_bytes, op_template.output_bytes_min));
  for (TemplateArgument& argument : op_template.arguments) stack_.push_back(to_ivalue(argument, call_data));
  if (op_template.size_argument_index >= 0) check_quota_for_outputs(op_template);
  if (op_template.argument_check)
    check_arguments(op_template.argument_check, op_template.op->schema(), stack_);
  c10::AutoGradMode grad_mode(op_template.runs_in_grad_mode);
  op_template.op->callBoxed(&stack_);
}

IValue OpRunner::to_ivalue(TemplateArgument& argument, const uint8_t*& call_data) {
  switch (argument.kind) {
    case ArgumentKind::Tensor:
      return load_tensor_argument(argument, call_data);
    case ArgumentKind::ScalarTensor:
      return load_scalar_argument(argument, call_data);
    case ArgumentKind::IntegerData:
      return read_next_value<int64_t>(call_data);
    case ArgumentKind::FloatData:
      return read_next_value<double>(call_data);
    case ArgumentKind::Generator:
      return generators_.get_or_create(read_next_value<uint32_t>(call_data));
    case ArgumentKind::List: {
      c10::impl::GenericList list(argument.item_type);
      list.reserve(argument.items.size());
      for (TemplateArgument& item : argument.items) list.push_back(to_ivalue(item, call_data));
      return list;
    }
    default:
      return argument.constant;
  }
}

const at::Tensor& OpRunner::load_tensor_argument(const TemplateArgument& argument,
                                                 const uint8_t*& call_data) {
  StorageSlot& slot = storages_.existing_slot(read_next_value<uint32_t>(call_data));
  int64_t offset = argument.has_offset ? read_next_value<int64_t>(call_data) : 0;
  inputs_.push_back({{}, &slot, argument.meta.get(), offset, argument.is_written});
  inputs_.back().tensor = storages_.get_view(slot, *argument.meta, offset);
  if (argument.is_written) replies_.before_storage_written(slot.storage);
  return inputs_.back().tensor;
}

const at::Tensor& OpRunner::load_scalar_argument(TemplateArgument& argument, const uint8_t*& call_data) {
  if (argument.scalar.use_count() > 1) {
    // The previous op of this template kept a reference.
    bool wrapped = argument.scalar.unsafeGetTensorImpl()->is_wrapped_number();
    argument.scalar = argument.scalar.clone();
    argument.scalar.unsafeGetTensorImpl()->set_wrapped_number(wrapped);
  }
  std::memcpy(argument.scalar.mutable_data_ptr(), call_data, argument.scalar.itemsize());
  call_data += SCALAR_TENSOR_BYTES;
  return argument.scalar;
}

bool OpRunner::has_changed_metadata(const OpInput& input) const {
  const c10::Storage& storage = input.tensor.unsafeGetTensorImpl()->unsafe_storage();
  return !input.meta->matches(input.tensor, input.offset) || !storage.is_alias_of(input.slot->storage) ||
         storage.nbytes() != input.slot->bytes;
}

void OpRunner::restore_resized_written_inputs() noexcept {
  for (OpInput& input : inputs_) {
    if (!input.is_written || !input.tensor.defined()) continue;
    bool changed = has_changed_metadata(input) || input.slot->storage.nbytes() != input.slot->bytes;
    input.tensor.reset();
    if (changed) storages_.restore_size_after_failed_op(*input.slot);
  }
}

void OpRunner::release_current_op() {
  stack_.clear();
  inputs_.clear();
  new_tensors_.clear();
}

void OpRunner::clear() {
  release_current_op();
  unbound_outputs_.clear();
}

// --- ops with predicted outputs -----------------------------------------------------------------

FailurePtr OpRunner::run(DecodedTemplate& op_template, WireReader& in) {
  if (!op_template.has_predicted_outputs)
    throw ProtocolError("an Op has a template without predicted outputs");
  const uint8_t* data = in.consume(op_template.call_data_bytes);
  const uint8_t* new_storages = in.consume(sizeof(uint32_t) * op_template.new_output_count);
  op_count_.store(op_count() + 1, std::memory_order_relaxed);
  for (uint32_t i = 0; i < op_template.new_output_count; i++)
    storages_.check_number_unused(read_storage_number(new_storages, i));
  try {
    invoke_op(op_template, data);
    check_input_metadata_unchanged();
    for (size_t i = 0; i < op_template.outputs.size(); i++) collect_output(op_template.outputs[i], stack_[i]);
    for (uint32_t i = 0; i < op_template.new_output_count; i++) {
      storages_.add_storage(read_storage_number(new_storages, i), std::move(new_tensors_[i]));
    }
    release_current_op();
    return nullptr;
  } catch (...) {
    return poison_outputs(op_template, data, new_storages);
  }
}

void OpRunner::check_input_metadata_unchanged() const {
  for (const OpInput& input : inputs_) {
    if (input.is_written && has_changed_metadata(input)) {
      throw OutputMismatch("predicted " + describe_tensor(input.meta->dtype, input.meta->sizes) +
                           " to be unchanged, got " +
                           describe_tensor(input.tensor.scalar_type(), input.tensor.sizes()));
    }
  }
}

void OpRunner::collect_output(const ExpectedOutput& predicted, const IValue& output) {
  switch (predicted.kind) {
    case OutputKind::New:
      if (!output.isTensor() || !output.toTensor().defined()) {
        throw OutputMismatch("predicted a tensor, got none");
      }
      new_tensors_.push_back(to_predicted_layout(output.toTensor(), predicted.meta));
      break;
    case OutputKind::None:
      if (!output.isNone() && !(output.isTensor() && !output.toTensor().defined())) {
        throw OutputMismatch("predicted nothing, got a " + output.tagKind());
      }
      break;
    case OutputKind::Alias:
      check_predicted_alias(predicted, output);
      break;
    case OutputKind::Integer:
      if (!output.isInt() || output.toInt() != predicted.integer) {
        throw OutputMismatch("predicted " + std::to_string(predicted.integer) + ", got another number");
      }
      break;
    default: {
      if (!output.isList()) throw OutputMismatch("predicted a list, got a " + output.tagKind());
      auto items = output.toListRef();
      if (items.size() != predicted.items.size()) {
        throw OutputMismatch("predicted " + std::to_string(predicted.items.size()) + " items, got " +
                             std::to_string(items.size()));
      }
      for (size_t i = 0; i < items.size(); i++) collect_output(predicted.items[i], items[i]);
    }
  }
}

at::Tensor OpRunner::to_predicted_layout(const at::Tensor& output, const TensorMeta& predicted) const {
  const c10::TensorImpl& impl = *output.unsafeGetTensorImpl();
  if (impl.dtype().toScalarType() != predicted.dtype || impl.sizes() != c10::IntArrayRef(predicted.sizes)) {
    throw OutputMismatch("predicted " + describe_tensor(predicted.dtype, predicted.sizes) + ", got " +
                         describe_tensor(output.scalar_type(), output.sizes()));
  }
  bool plain = storages_.is_ordinary_tensor(output) ||
               (output.device().is_cpu() && output.dim() == 0 && !output.is_neg() && !output.is_conj() &&
                !output._is_zerotensor());
  if (plain && impl.storage_offset() == 0 && impl.strides() == c10::IntArrayRef(predicted.strides) &&
      owns_whole_storage(output) && predicted.span_bytes <= impl.unsafe_storage().nbytes()) {
    return output;
  }
  check_supported_result(output);
  auto options = at::TensorOptions().dtype(predicted.dtype).device(storages_.device());
  at::Tensor copy = at::empty_strided(predicted.sizes, predicted.strides, options);
  if (output._is_zerotensor()) {
    copy.zero_();
  } else {
    copy.copy_(output);
  }
  return copy;
}

void OpRunner::check_predicted_alias(const ExpectedOutput& predicted, const IValue& output) const {
  const OpInput& input = inputs_[predicted.alias_index];
  if (output.isTensor() && output.toTensor().is_same(input.tensor)) return;
  if (output.isTensor() && output.toTensor().defined() && output.toTensor().layout() == c10::kStrided &&
      output.toTensor().storage().is_alias_of(input.slot->storage) &&
      input.meta->matches(output.toTensor(), input.offset)) {
    return;
  }
  throw OutputMismatch("predicted an input tensor, got another tensor");
}

// Whether the op writes to a tensor that is not poisoned.
bool OpRunner::writes_to_unpoisoned_tensor(const std::vector<TemplateArgument>& arguments,
                                           const uint8_t* call_data) {
  bool found = false;
  for_each_tensor_argument(arguments, call_data, [&](const TemplateArgument& argument, uint32_t storage) {
    const StorageSlot& slot = storages_.existing_slot(storage);
    found = found || (argument.is_written && !slot.failure);
  });
  return found;
}

FailurePtr OpRunner::poison_outputs(const DecodedTemplate& op_template, const uint8_t* call_data,
                                    const uint8_t* new_storages) {
  FailurePtr failure = failure_from_current_exception(op_template.name, op_count());
  // The original failure was reported, but not that a usable tensor was not written.
  bool report =
      failure->number == op_count() || writes_to_unpoisoned_tensor(op_template.arguments, call_data);
  restore_resized_written_inputs();
  release_current_op();
  for (uint32_t i = 0; i < op_template.new_output_count; i++)
    storages_.add_poisoned_storage(read_storage_number(new_storages, i), failure);
  return report ? failure : nullptr;
}

// --- dynamic ops --------------------------------------------------------------------------------

void OpRunner::skip_dynamic_op(const DecodedTemplate& op_template, WireReader& in) {
  in.consume(op_template.call_data_bytes);
  op_count_.store(op_count() + 1, std::memory_order_relaxed);
}

FailurePtr OpRunner::run_dynamic(DecodedTemplate& op_template, WireReader& in, uint64_t reply_number,
                                 WireWriter& reply) {
  if (op_template.has_predicted_outputs)
    throw ProtocolError("a DynamicOp has a template with predicted outputs");
  if (unbound_outputs_.size() >= UNBOUND_REPLIES_MAX)
    throw ProtocolError("too many dynamic ops with unbound outputs");
  const uint8_t* data = in.consume(op_template.call_data_bytes);
  op_count_.store(op_count() + 1, std::memory_order_relaxed);
  try {
    invoke_op(op_template, data);
    reply.write_u32(static_cast<uint32_t>(stack_.size()));
    for (const IValue& value : stack_) encode_output(value, reply);
    encode_resized_inputs(reply);
    if (!new_tensors_.empty()) {
      storages_.add_counted_bytes(static_cast<int64_t>(total_storage_bytes(new_tensors_)));
      unbound_outputs_.emplace(reply_number, std::move(new_tensors_));
    }
    release_current_op();
    return nullptr;
  } catch (...) {
    FailurePtr failure = failure_from_current_exception(op_template.name, op_count());
    restore_resized_written_inputs();
    release_current_op();
    return failure;
  }
}

// Checks the size argument of an op against the quota, before the op allocates.
void OpRunner::check_quota_for_outputs(const DecodedTemplate& op_template) const {
  auto sizes = stack_[static_cast<size_t>(op_template.size_argument_index)].toIntVector();
  storages_.check_quota(tensor_bytes_min(sizes, inputs_.empty() ? 1 : inputs_[0].meta->item_bytes));
}

void OpRunner::encode_output(const IValue& value, WireWriter& reply) {
  auto kind = [&reply](OutputKind kind) { reply.write_u8(static_cast<uint8_t>(kind)); };
  if (value.isTensor()) {
    encode_tensor(value.toTensor(), reply);
  } else if (value.isList()) {
    auto items = value.toListRef();
    if (items.size() > LIST_ITEMS_MAX) throw OpRefused("the op returns too many results");
    kind(OutputKind::List);
    reply.write_u32(static_cast<uint32_t>(items.size()));
    for (const IValue& item : items) encode_output(item, reply);
  } else if (value.isNone()) {
    kind(OutputKind::None);
  } else if (value.isInt()) {
    kind(OutputKind::Integer);
    reply.write_i64(value.toInt());
  } else if (value.isDouble()) {
    kind(OutputKind::Float);
    reply.write_f64(value.toDouble());
  } else if (value.isBool()) {
    kind(OutputKind::Boolean);
    reply.write_u8(value.toBool());
  } else if (value.isComplexDouble()) {
    kind(OutputKind::Complex);
    reply.write_f64(value.toComplexDouble().real());
    reply.write_f64(value.toComplexDouble().imag());
  } else {
    throw OpRefused("the result is a " + value.tagKind() + ", which is not supported");
  }
}

void OpRunner::encode_tensor(const at::Tensor& tensor, WireWriter& reply) {
  if (!tensor.defined()) {
    reply.write_u8(static_cast<uint8_t>(OutputKind::None));
    return;
  }
  for (size_t i = 0; i < inputs_.size(); i++) {
    if (!tensor.is_same(inputs_[i].tensor)) continue;
    reply.write_u8(static_cast<uint8_t>(OutputKind::Alias));
    reply.write_u32(static_cast<uint32_t>(i));
    return;
  }
  new_tensors_.push_back(copy_if_shared(tensor));
  const at::Tensor& added = new_tensors_.back();
  reply.write_u8(static_cast<uint8_t>(OutputKind::New));
  reply.write_u8(static_cast<uint8_t>(added.scalar_type()));
  reply.write_u8(static_cast<uint8_t>(added.dim()));
  for (int64_t size : added.sizes()) reply.write_i64(size);
  for (int64_t stride : added.strides()) reply.write_i64(stride);
}

at::Tensor OpRunner::copy_if_shared(const at::Tensor& output) const {
  check_supported_result(output);
  bool host_scalar = output.device().is_cpu() && output.dim() == 0;
  bool on_device = host_scalar || output.device() == storages_.device();
  bool lazy = output.is_conj() || output.is_neg() || output._is_zerotensor();
  if (on_device && !lazy && output.storage_offset() == 0 && owns_whole_storage(output)) return output;
  storages_.check_quota(static_cast<uint64_t>(output.numel()) * output.itemsize());
  if (output._is_zerotensor()) return at::zeros(output.sizes(), output.options().device(storages_.device()));
  at::Tensor plain = output.resolve_conj().resolve_neg();
  plain = on_device ? plain : plain.to(storages_.device());
  return owns_whole_storage(plain) && plain.storage_offset() == 0 ? plain : plain.clone();
}

// Encodes inputs that the op has resized. Updates their sizes last, after everything that can fail.
void OpRunner::encode_resized_inputs(WireWriter& reply) {
  std::vector<uint32_t> changed;
  uint64_t more_bytes = total_storage_bytes(new_tensors_);
  for (uint32_t i = 0; i < inputs_.size(); i++) {
    const OpInput& input = inputs_[i];
    if (!input.is_written || !has_changed_metadata(input)) continue;
    if (!input.tensor.storage().is_alias_of(input.slot->storage)) {
      throw OpRefused("the op gives a tensor the memory of another one");
    }
    check_supported_result(input.tensor);
    changed.push_back(i);
    uint64_t new_output_bytes = input.slot->storage.nbytes();
    more_bytes += new_output_bytes > input.slot->bytes ? new_output_bytes - input.slot->bytes : 0;
  }
  storages_.check_quota(more_bytes);
  reply.write_u32(static_cast<uint32_t>(changed.size()));
  for (uint32_t i : changed) {
    const at::Tensor& tensor = inputs_[i].tensor;
    reply.write_u32(i);
    reply.write_u64(tensor.storage().nbytes());
    reply.write_u8(static_cast<uint8_t>(tensor.dim()));
    reply.write_i64(tensor.storage_offset());
    for (int64_t size : tensor.sizes()) reply.write_i64(size);
    for (int64_t stride : tensor.strides()) reply.write_i64(stride);
    storages_.update_size_after_op(*inputs_[i].slot);
  }
}

void OpRunner::bind_outputs(uint64_t reply_number, uint32_t output_count, WireReader& in) {
  const uint8_t* numbers = in.consume(sizeof(uint32_t) * output_count);
  auto found = unbound_outputs_.find(reply_number);
  if (found == unbound_outputs_.end() ? output_count != 0 : output_count != found->second.size()) {
    throw ProtocolError("reply " + std::to_string(reply_number) + " does not have " +
                        std::to_string(output_count) + " outputs to bind");
  }
  if (found == unbound_outputs_.end()) return;
  storages_.add_counted_bytes(-static_cast<int64_t>(total_storage_bytes(found->second)));
  for (uint32_t i = 0; i < output_count; i++)
    storages_.add_storage(read_storage_number(numbers, i), std::move(found->second[i]));
  unbound_outputs_.erase(found);
}

}  // namespace genie
