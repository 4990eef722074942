// Converts a call of an op to a record. The arguments are split into a key (kinds, shapes, values that affect
// shapes) and data (storages, offsets, numbers). The template of a known key predicts the outputs; for a new
// key they are inferred on torch's meta device, or by the executor. Not here: ops that run in the client
// (kernels.cpp).
#include "dispatch.h"

#include <ATen/core/Tensor.h>

#include "current_settings.h"
#include "dynamic_ops.h"
#include "op_call.h"
#include "device_type.h"
#include "errors.h"
#include "generator.h"
#include "op_table.h"
#include "shape_inference.h"
#include "results.h"
#include "device_registry.h"
#include "storage.h"
#include "template_body.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr size_t OP_CALL_BYTES_MAX = FRAME_BYTES_MAX - (256u << 10);
constexpr int INFERENCE_ATTEMPTS_MAX = 4;

// --- settings -----------------------------------------------------------------------------------

// torch has no notification of changes, so each call compares the settings. Elementwise ops and views depend
// on few of them, which are cheap to read.
void add_base_settings_to_key(const KnownOp& known_op, OpCall& call) {
  call.base_settings = current_base_settings();
  call.template_key.push_back(static_cast<int64_t>(known_op.number) << 16 |
                              call.base_settings.default_dtype << 8 | call.base_settings.flushes_denormals);
}

KernelSettings kernel_settings_for(const Connection& connection) {
  return current_kernel_settings(connection.executor_uses_cpu() ? PrecisionsOf::Cpu : PrecisionsOf::Gpu);
}

// After the arguments, which determine the connection.
void add_kernel_settings_to_key(const KnownOp& known_op, OpCall& call) {
  call.kernel_settings.reset();
  if (!known_op.depends_on_kernel_settings) return;
  call.kernel_settings = kernel_settings_for(*call.connection);
  int64_t words[sizeof(KernelSettings) / sizeof(int64_t)];
  static_assert(sizeof words == sizeof(KernelSettings));
  std::memcpy(words, &*call.kernel_settings, sizeof words);
  call.template_key.insert(call.template_key.end(), std::begin(words), std::end(words));
}

void send_changed_settings(const OpCall& call, Connection::LockedRecordWriter& writer) {
  std::optional<Settings>& sent = writer.sent_settings();
  bool is_unchanged = sent && sent->base == call.base_settings &&
                      (!call.kernel_settings || sent->kernels == *call.kernel_settings);
  if (is_unchanged) return;
  Settings changed{call.base_settings, call.kernel_settings.value_or(kernel_settings_for(*call.connection))};
  check_settings_supported(changed);
  writer.records().begin_record(RecordKind::Settings);
  writer.records().append_value(changed);
  sent = changed;
}

// --- the key and the data of a call -------------------------------------------------------------

int64_t make_template_key_word(ArgumentKind kind, int64_t kind_specific_bits = 0) {
  return static_cast<int64_t>(kind) | kind_specific_bits << 8;
}

[[noreturn]] void raise_different_devices(const Connection& first, const c10::Device& second) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
              first.options().device_name, " and ", second, "!");
}

// The first tensor of the call on the same storage, or -1.
int64_t find_first_tensor_index_on_storage(OpCall& call, const c10::StorageImpl* storage) {
  constexpr size_t LINEAR_SEARCH_TENSORS_MAX = 16;
  if (call.remote_tensors.size() <= LINEAR_SEARCH_TENSORS_MAX) {
    for (size_t i = 0; i < call.remote_tensors.size(); i++) {
      const auto* impl = call.remote_tensors[i]->unsafeGetTensorImpl();
      if (impl->unsafe_storage().unsafeGetStorageImpl() == storage) return static_cast<int64_t>(i);
    }
    return -1;
  }
  if (call.first_tensor_index_by_storage.empty()) {
    for (size_t i = 0; i < call.remote_tensors.size(); i++) {
      const auto* impl = call.remote_tensors[i]->unsafeGetTensorImpl();
      call.first_tensor_index_by_storage.emplace(impl->unsafe_storage().unsafeGetStorageImpl(),
                                                 static_cast<int64_t>(i));
    }
  }
  auto [found, added] =
      call.first_tensor_index_by_storage.emplace(storage, static_cast<int64_t>(call.remote_tensors.size()));
  return added ? -1 : found->second;
}

// Aliasing of inputs determines which outputs alias inputs, so it is part of the key.
void add_aliasing_to_key(OpCall& call, const c10::TensorImpl* impl) {
  int64_t first = find_first_tensor_index_on_storage(call, impl->unsafe_storage().unsafeGetStorageImpl());
  if (first < 0) return;
  bool same = call.remote_tensors[static_cast<size_t>(first)]->unsafeGetTensorImpl() == impl;
  call.template_key.push_back(-2 * (first + 1) -
                              (same ? 1 : 0));  // no other word at this position is negative
}

void add_remote_tensor_to_call(OpCall& call, const Tensor& tensor, bool is_written) {
  auto* impl = tensor.unsafeGetTensorImpl();
  StorageHandle found_by_pointer;
  const StorageHandle* own_handle = find_storage_handle(*impl);
  if (!own_handle) found_by_pointer = storage_handle_of(*impl);
  const StorageHandle& handle = own_handle ? *own_handle : found_by_pointer;
  if (!call.connection) {
    call.connection = handle.connection.get();
    if (!own_handle) call.kept_connection = handle.connection;
  } else if (call.connection != handle.connection.get()) {
    if (handle.connection->is_session_lost()) handle.connection->raise_session_lost();
    if (call.connection->is_session_lost()) call.connection->raise_session_lost();
    raise_different_devices(*call.connection, impl->device());
  }
  int64_t offset = impl->storage_offset();
  auto sizes = impl->sizes(), strides = impl->strides();
  size_t dimensions = sizes.size();
  check_tensor_can_be_sent(*impl);
  int64_t flags = (offset ? VIEW_HAS_OFFSET : 0) | (impl->is_conj() ? VIEW_CONJUGATE : 0) |
                  (impl->is_neg() ? VIEW_NEGATIVE : 0);
  call.template_key.push_back(
      make_template_key_word(ArgumentKind::Tensor, static_cast<int64_t>(impl->dtype().toScalarType()) |
                                                       flags << 8 | static_cast<int64_t>(dimensions) << 16));
  size_t at = call.template_key.size();
  call.template_key.resize(at + 2 * dimensions);
  std::copy(sizes.begin(), sizes.end(), call.template_key.begin() + static_cast<ptrdiff_t>(at));
  std::copy(strides.begin(), strides.end(),
            call.template_key.begin() + static_cast<ptrdiff_t>(at + dimensions));
  add_aliasing_to_key(call, impl);
  call.record_data.write_u32(handle.storage_number);
  if (offset) call.record_data.write_i64(offset);
  call.remote_tensors.push_back(&tensor);
  call.connection->track_storage_access(handle.storage_number, impl->unsafe_storage(), is_written);
}

void add_tensor_to_call(OpCall& call, const Tensor& tensor, bool is_written) {
  if (!tensor.defined()) {
    call.template_key.push_back(make_template_key_word(ArgumentKind::Undefined));
    return;
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->device().type() == DEVICE_TYPE) {
    add_remote_tensor_to_call(call, tensor, is_written);
  } else if (impl->device().is_cpu() && impl->dim() == 0 && !is_written && impl->layout() == at::kStrided) {
    call.template_key.push_back(make_template_key_word(
        ArgumentKind::ScalarTensor, static_cast<int64_t>(impl->dtype().toScalarType()) |
                                        static_cast<int64_t>(impl->is_wrapped_number()) << 8));
    uint8_t* value = call.record_data.append_uninitialized(16);
    std::memset(value, 0, 16);
    Tensor plain = tensor.resolve_conj().resolve_neg();
    std::memcpy(value, plain.const_data_ptr(), plain.itemsize());
  } else {
    call.misplaced_cpu_tensor = &tensor;
  }
}

void add_text_to_template_key(OpCall& call, const std::string& text) {
  if (text.size() > TEXT_BYTES_MAX) raise_python_error("device.op_refused", "a string argument is too long");
  call.template_key.push_back(make_template_key_word(ArgumentKind::Text, static_cast<int64_t>(text.size())));
  size_t at = call.template_key.size();
  call.template_key.resize(at + (text.size() + 7) / 8, 0);
  if (!text.empty()) std::memcpy(&call.template_key[at], text.data(), text.size());
}

int64_t double_to_bits(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// `numbers_as_data`: integers are sent as data, also those in a list; `float_as_data`: likewise for floats
// that are not in a list.
void add_argument_to_call(OpCall& call, const IValue& value, bool numbers_as_data, bool float_as_data,
                          bool is_written) {
  if (value.isTensor()) {
    add_tensor_to_call(call, value.toTensor(), is_written);
  } else if (value.isInt()) {
    call.template_key.push_back(
        make_template_key_word(numbers_as_data ? ArgumentKind::IntegerData : ArgumentKind::Integer));
    numbers_as_data ? call.record_data.write_i64(value.toInt()) : call.template_key.push_back(value.toInt());
  } else if (value.isNone()) {
    call.template_key.push_back(make_template_key_word(ArgumentKind::None));
  } else if (value.isDouble()) {
    call.template_key.push_back(
        make_template_key_word(float_as_data ? ArgumentKind::FloatData : ArgumentKind::Float));
    float_as_data ? call.record_data.write_f64(value.toDouble())
                  : call.template_key.push_back(double_to_bits(value.toDouble()));
  } else if (value.isBool()) {
    call.template_key.push_back(make_template_key_word(ArgumentKind::Boolean, value.toBool()));
  } else if (value.isList()) {
    auto items = value.toListRef();
    if (items.size() > LIST_ITEMS_MAX) raise_python_error("device.op_refused", "a list argument is too long");
    call.template_key.push_back(
        make_template_key_word(ArgumentKind::List, static_cast<int64_t>(items.size())));
    for (const IValue& item : items)
      add_argument_to_call(call, item, numbers_as_data, numbers_as_data, is_written);
  } else if (value.isDevice()) {
    call.template_key.push_back(make_template_key_word(ArgumentKind::Device));
  } else if (value.isString()) {
    add_text_to_template_key(call, value.toStringRef());
  } else if (value.isSymInt()) {
    call.template_key.push_back(make_template_key_word(ArgumentKind::Integer));
    call.template_key.push_back(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else if (value.isComplexDouble()) {
    auto number = value.toComplexDouble();
    call.template_key.push_back(make_template_key_word(ArgumentKind::Complex));
    call.template_key.push_back(double_to_bits(number.real()));
    call.template_key.push_back(double_to_bits(number.imag()));
  } else if (value.isGenerator()) {
    call.template_key.push_back(make_template_key_word(ArgumentKind::Generator));
    call.generator = value.toGenerator();
    call.generator_offset = call.record_data.size();
    call.record_data.write_u32(0);  // set when the connection is known
  } else {
    raise_python_error("device.op_refused", "arguments of type " + value.tagKind() + " are not supported");
  }
}

bool writes_argument(const OpTraits& traits, const Stack& stack, size_t first_argument,
                     size_t argument_index) {
  if (traits.is_mutable_argument[argument_index] || !traits.may_write_batch_norm_statistics)
    return traits.is_mutable_argument[argument_index];
  return traits.is_batch_norm_statistic[argument_index] &&
         (!traits.training_argument_index ||
          stack[first_argument + *traits.training_argument_index].toBool());
}

// --- a call -------------------------------------------------------------------------------------

void replace_arguments_with_results(const std::vector<OutputSpec>& outputs, Connection& connection,
                                    const uint32_t* storages, const OpCall& call, const OpTraits& traits,
                                    Stack* stack) {
  if (outputs.size() == 1 && outputs[0].kind == OutputKind::New && !outputs[0].is_view) {
    Tensor made = make_remote_tensor(connection, *storages, outputs[0]);
    torch::jit::drop(*stack, traits.argument_count);
    stack->emplace_back(std::move(made));
    return;
  }
  if (outputs.size() == 1 && outputs[0].kind == OutputKind::Alias) {
    Tensor same = *call.remote_tensors[static_cast<size_t>(outputs[0].source_input_index)];
    torch::jit::drop(*stack, traits.argument_count);
    stack->emplace_back(std::move(same));
    return;
  }
  std::vector<Tensor> inputs = copy_tensor_references(call.remote_tensors);
  c10::SmallVector<IValue, 4> results;
  for (const OutputSpec& output : outputs)
    results.push_back(make_result(output, connection, storages, inputs));
  torch::jit::drop(*stack, traits.argument_count);
  for (IValue& result : results) stack->push_back(std::move(result));
}

// Moves CPU tensors (indices) among the arguments to the device.
void move_cpu_tensors_to_device(Stack* stack, size_t first_argument, size_t argument_count,
                                c10::Device device) {
  auto moved = [&](const IValue& value) -> IValue {
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    const Tensor& tensor = value.toTensor();
    return tensor.device().is_cpu() && tensor.dim() > 0 ? IValue(tensor.to(device)) : value;
  };
  for (size_t i = first_argument; i < first_argument + argument_count; i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = moved(value);
    } else if (value.isList()) {
      auto items = value.toList();
      c10::impl::GenericList list(items.elementType());
      for (size_t j = 0; j < items.size(); j++) list.push_back(moved(items.get(j)));
      value = list;
    }
  }
}

// For a call without remote tensors: the connection of its device argument.
ConnectionPtr connection_of_device_argument(const Stack& stack, size_t first_argument,
                                            const OpTraits& traits) {
  int index = -1;
  for (size_t i = 0; i < traits.argument_count; i++) {
    const IValue& value = stack[first_argument + i];
    if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) index = value.toDevice().index();
  }
  return device_registry().get_or_open_connection(index);
}

constexpr uint32_t LEARNED_OUTPUTS_RESERVED = 16;

size_t count_outputs_and_list_items(const std::vector<OutputSpec>& outputs) {
  size_t count = outputs.size();
  for (const OutputSpec& output : outputs) count += count_outputs_and_list_items(output.items);
  return count;
}

uint32_t count_arguments_and_list_items(const Stack& stack, size_t first_argument, const OpTraits& traits) {
  size_t count = traits.argument_count;
  for (size_t i = 0; i < traits.argument_count; i++) {
    const IValue& value = stack[first_argument + i];
    if (value.isList()) count += value.toListRef().size();
  }
  return static_cast<uint32_t>(count);
}

CachedTemplatePtr infer_and_cache_template(const c10::OperatorHandle& op, const OpTraits& traits,
                                           const Stack& stack, size_t first_argument, const OpCall& call,
                                           uint64_t hash, Connection::LockedRecordWriter& writer,
                                           bool& resized) {
  auto made = c10::make_intrusive<CachedTemplate>();
  made->key = call.template_key;
  made->hash = hash;
  writer.unlock();
  InferredOutputs inference = infer_outputs(op, traits, stack, first_argument, call.remote_tensors);
  resized = inference.has_resized_arguments;
  if (resized) return {};
  made->mode = inference.mode;
  made->outputs = std::move(inference.outputs);
  for (const OutputSpec& output : made->outputs) made->new_storage_count += count_new_storages(output);
  WireWriter body;
  if (made->mode != OpExecutionMode::ClientOnly) {
    body = encode_template_body(op, traits, stack, first_argument,
                                made->mode == OpExecutionMode::Streamed ? &made->outputs : nullptr);
    if (body.size() + call.record_data.size() > OP_CALL_BYTES_MAX) {
      raise_python_error("device.op_refused", op.schema().name() + " has too many arguments");
    }
    made->argument_and_output_count = count_arguments_and_list_items(stack, first_argument, traits) +
                                      static_cast<uint32_t>(count_outputs_and_list_items(made->outputs)) +
                                      LEARNED_OUTPUTS_RESERVED;
  }
  writer.lock_again();
  writer.counters().template_misses++;
  writer.templates().insert(made, writer.records());
  if (made->mode != OpExecutionMode::ClientOnly) write_define_template(writer.records(), made->number, body);
  return made;
}

void run_predicted_op(const CachedTemplatePtr& cached_template, Connection::LockedRecordWriter& writer,
                      const OpCall& call, const OpTraits& traits, Stack* stack) {
  Connection& connection = *call.connection;
  uint32_t few[8];
  std::vector<uint32_t> many;
  uint32_t* storages = few;
  if (cached_template->new_storage_count > 8) {
    many.resize(cached_template->new_storage_count);
    storages = many.data();
  }
  if (cached_template->mode == OpExecutionMode::ClientOnly) {
    writer.unlock();
  } else {
    for (uint32_t i = 0; i < cached_template->new_storage_count; i++)
      storages[i] = writer.assign_storage_number();
    WireWriter& records = writer.records();
    records.begin_record(RecordKind::Op, cached_template->number);
    records.append_bytes(call.record_data.data(), call.record_data.size());
    records.append_bytes(storages, cached_template->new_storage_count * sizeof(uint32_t));
    writer.finish_record();
  }
  bool wait = connection.options().waits_for_every_op &&
              cached_template->mode != OpExecutionMode::ClientOnly && !connection.is_recording_thread();
  ConnectionPtr kept = wait ? ConnectionPtr::reclaim_copy(&connection) : ConnectionPtr();
  replace_arguments_with_results(cached_template->outputs, connection, storages, call, traits, stack);
  if (wait) kept->synchronize();
}

}  // namespace

void send_op(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const KnownOp& known_op = get_known_op(op);
  const OpTraits& traits = known_op.traits;
  size_t base = stack->size() - traits.argument_count;
  static thread_local OpCall scratch;
  for (int attempt = 0; attempt < INFERENCE_ATTEMPTS_MAX; attempt++) {
    OpCall call = std::move(scratch);  // inference may call other ops
    call.clear();
    add_base_settings_to_key(known_op, call);
    for (size_t i = 0; i < traits.argument_count; i++) {
      add_argument_to_call(call, (*stack)[base + i], traits.has_numbers[i] && traits.sends_numbers_as_data,
                           traits.sends_numbers_as_data, writes_argument(traits, *stack, base, i));
    }
    if (!call.connection) {
      call.kept_connection = connection_of_device_argument(*stack, base, traits);
      call.connection = call.kept_connection.get();
    }
    if (call.misplaced_cpu_tensor) {
      if (!traits.accepts_cpu_indices || attempt > 0)
        raise_different_devices(*call.connection, call.misplaced_cpu_tensor->device());
      c10::Device there(DEVICE_TYPE, static_cast<c10::DeviceIndex>(call.connection->options().device_index));
      move_cpu_tensors_to_device(stack, base, traits.argument_count, there);
      scratch = std::move(call);
      continue;
    }
    if (call.generator.defined()) {
      call.record_data.overwrite_u32(call.generator_offset,
                                     check_and_get_generator_number(call.generator, *call.connection));
    }
    add_kernel_settings_to_key(known_op, call);
    uint64_t hash = hash_template_key(call.template_key);
    Connection::LockedRecordWriter writer(*call.connection);
    CachedTemplatePtr known = writer.templates().find(hash, call.template_key);
    if (!known) {
      bool resized = false;
      known = infer_and_cache_template(op, traits, *stack, base, call, hash, writer, resized);
      if (resized) {
        scratch = std::move(call);
        continue;
      }
    }
    if (known->mode != OpExecutionMode::ClientOnly) send_changed_settings(call, writer);
    if (known->mode == OpExecutionMode::AwaitReply || known->mode == OpExecutionMode::LearnFromReply) {
      if (known->mode == OpExecutionMode::AwaitReply)
        call.connection->check_not_recording(op.schema().name().c_str());
      run_dynamic_op(op, traits, known, writer, call, stack);
    } else {
      run_predicted_op(known, writer, call, traits, stack);
    }
    call.release_references();
    scratch = std::move(call);
    return;
  }
  raise_python_error("device.op_refused", op.schema().name() + ": the shapes of its outputs do not converge");
}

}  // namespace genie
