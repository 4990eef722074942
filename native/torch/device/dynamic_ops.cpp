// See dynamic_ops.h.
#include "dynamic_ops.h"

#include <ATen/EmptyTensor.h>

#include "results.h"
#include "template_body.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

void check_sizes_not_negative(c10::IntArrayRef values) {
  for (int64_t value : values)
    if (value < 0) throw ProtocolError("a size or a stride is negative");
}

OutputSpec read_output_spec(WireReader& in, const c10::TypePtr& type, bool in_list = false) {
  OutputSpec output;
  output.kind = static_cast<OutputKind>(in.read_u8());
  switch (output.kind) {
    case OutputKind::None:
      break;
    case OutputKind::New: {
      output.dtype = static_cast<c10::ScalarType>(in.read_u8());
      size_t dimensions = in.read_u8();
      if (!is_supported_dtype(output.dtype) || dimensions > DIMENSIONS_MAX)
        throw ProtocolError("an output is malformed");
      for (size_t i = 0; i < dimensions; i++) output.sizes.push_back(in.read_i64());
      for (size_t i = 0; i < dimensions; i++) output.strides.push_back(in.read_i64());
      check_sizes_not_negative(output.sizes);
      check_sizes_not_negative(output.strides);
      output.storage_bytes = static_cast<int64_t>(
          at::detail::computeStorageNbytes(output.sizes, output.strides, c10::elementSize(output.dtype)));
      break;
    }
    case OutputKind::Alias:
      output.source_input_index = static_cast<int>(in.read_u32());
      break;
    case OutputKind::List: {
      uint32_t count = in.read_u32();
      if (in_list || count > LIST_ITEMS_MAX) throw ProtocolError("an output is malformed");
      auto* list = type->castRaw<c10::ListType>();
      c10::TypePtr element = list ? list->getElementType() : c10::TypePtr(c10::TensorType::get());
      for (uint32_t i = 0; i < count; i++) output.items.push_back(read_output_spec(in, element, true));
      output.constant = c10::impl::GenericList(element);
      break;
    }
    case OutputKind::Integer:
      output.constant = in.read_i64();
      break;
    case OutputKind::Float:
      output.constant = in.read_f64();
      break;
    case OutputKind::Boolean:
      output.constant = in.read_u8() != 0;
      break;
    case OutputKind::Complex: {
      double real = in.read_f64();
      output.constant = c10::complex<double>(real, in.read_f64());
      break;
    }
    default:
      throw ProtocolError("an output is of an unknown kind");
  }
  return output;
}

void check_alias_sources(const OutputSpec& output, size_t input_count) {
  if (output.kind == OutputKind::Alias && static_cast<size_t>(output.source_input_index) >= input_count) {
    throw ProtocolError("an output is an alias of an unknown input");
  }
  for (const OutputSpec& item : output.items) check_alias_sources(item, input_count);
}

// Applies the new shapes of inputs that the op has resized.
void apply_resized_inputs(WireReader& in, const std::vector<Tensor>& inputs) {
  for (uint32_t left = in.read_u32(); left > 0; left--) {
    uint32_t index = in.read_u32();
    uint64_t bytes = in.read_u64();
    size_t dimensions = in.read_u8();
    if (index >= inputs.size() || dimensions > DIMENSIONS_MAX)
      throw ProtocolError("a resized input is malformed");
    int64_t offset = in.read_i64();
    std::vector<int64_t> sizes, strides;
    for (size_t i = 0; i < dimensions; i++) sizes.push_back(in.read_i64());
    for (size_t i = 0; i < dimensions; i++) strides.push_back(in.read_i64());
    check_sizes_not_negative(sizes);
    check_sizes_not_negative(strides);
    inputs[index].storage().unsafeGetStorageImpl()->set_nbytes(bytes);
    inputs[index].unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  }
}

// Whether the outputs hold for all calls with the same key.
bool has_static_outputs(const std::vector<OutputSpec>& outputs, bool resizes_inputs) {
  if (resizes_inputs) return false;
  for (const OutputSpec& output : outputs) {
    if (output.kind > OutputKind::Integer) return false;  // a value, not a shape
    if (!has_static_outputs(output.items, false)) return false;
  }
  return true;
}

struct DynamicOpReply {
  std::vector<OutputSpec> outputs;
  uint32_t new_output_count = 0;
  bool resizes_inputs = false;
};

DynamicOpReply read_dynamic_op_reply(WireReader& in, const c10::FunctionSchema& schema, size_t input_count) {
  DynamicOpReply op_reply;
  if (in.read_u32() != schema.returns().size())
    throw ProtocolError("a reply has another number of outputs than the op");
  for (const auto& returned : schema.returns()) {
    op_reply.outputs.push_back(read_output_spec(in, returned.type()));
    check_alias_sources(op_reply.outputs.back(), input_count);
    op_reply.new_output_count += count_new_storages(op_reply.outputs.back());
  }
  op_reply.resizes_inputs = WireReader(in).read_u32() > 0;
  return op_reply;
}

// An op that only returns integers derived from shapes is not sent again.
bool returns_only_integers(const OpTraits& traits, const std::vector<OutputSpec>& outputs) {
  if (traits.writes_arguments || outputs.empty()) return false;
  for (const OutputSpec& output : outputs)
    if (output.kind != OutputKind::Integer) return false;
  return true;
}

// From now on the op is streamed, with the outputs of this reply as prediction.
void cache_learned_outputs(const c10::OperatorHandle& op, const OpTraits& traits,
                           CachedTemplate& cached_template, const DynamicOpReply& op_reply,
                           Connection::LockedRecordWriter& writer, const Stack& stack) {
  writer.templates().assign_new_template_number(cached_template, writer.records());
  cached_template.outputs = op_reply.outputs;
  cached_template.new_storage_count = op_reply.new_output_count;
  cached_template.mode = returns_only_integers(traits, op_reply.outputs) ? OpExecutionMode::ClientOnly
                                                                         : OpExecutionMode::Streamed;
  if (cached_template.mode == OpExecutionMode::ClientOnly) return;
  write_define_template(
      writer.records(), cached_template.number,
      encode_template_body(op, traits, stack, stack.size() - traits.argument_count, &op_reply.outputs));
}

// An op that ran as a DynamicOp during a recording becomes a step of the graph, now that its outputs are
// known.
void write_graph_step(const CachedTemplate& cached_template, Connection::LockedRecordWriter& writer,
                      const OpCall& call, const std::vector<uint32_t>& storages) {
  writer.records().begin_record(RecordKind::GraphStep, cached_template.number);
  writer.records().append_bytes(call.record_data.data(), call.record_data.size());
  writer.records().append_bytes(storages.data(), storages.size() * sizeof(uint32_t));
}

}  // namespace

void run_dynamic_op(const c10::OperatorHandle& op, const OpTraits& traits,
                    const CachedTemplatePtr& cached_template, Connection::LockedRecordWriter& writer,
                    const OpCall& call, Stack* stack) {
  Connection& connection = *call.connection;
  std::vector<Tensor> inputs = copy_tensor_references(call.remote_tensors);
  PendingReply reply;
  reply.needs_output_binding = true;
  writer.records().begin_record(RecordKind::DynamicOp, cached_template->number);
  writer.records().append_bytes(call.record_data.data(), call.record_data.size());
  writer.counters().dynamic_ops++;
  writer.counters().ops++;
  uint64_t number = writer.finish_record_and_request_reply(reply);
  connection.wait_for_reply(number, reply);
  WireReader in(reply.payload.data(), reply.payload.size());
  DynamicOpReply op_reply;
  std::vector<uint32_t> storages;
  bool is_repeatable = false;  // other threads may change the mode of the template
  try {
    op_reply = read_dynamic_op_reply(in, op.schema(), inputs.size());
    try {
      writer.lock_again();
      writer.check_storage_numbers_left(op_reply.new_output_count);
    } catch (...) {
      writer.unlock();
      connection.discard_outputs(number, op_reply.new_output_count);
      throw;
    }
    storages.resize(op_reply.new_output_count);
    for (uint32_t& storage : storages) storage = writer.assign_storage_number();
    writer.records().begin_record(RecordKind::BindOutputs, op_reply.new_output_count);
    writer.records().write_u64(number);
    writer.records().append_bytes(storages.data(), storages.size() * sizeof(uint32_t));
    // The template may have been evicted during the wait.
    bool is_cached = writer.templates().find(cached_template->hash, cached_template->key) == cached_template;
    if (is_cached && cached_template->mode == OpExecutionMode::LearnFromReply &&
        has_static_outputs(op_reply.outputs, op_reply.resizes_inputs)) {
      cache_learned_outputs(op, traits, *cached_template, op_reply, writer, *stack);
    }
    is_repeatable = cached_template->mode != OpExecutionMode::AwaitReply &&
                    cached_template->mode != OpExecutionMode::LearnFromReply;
    if (connection.is_recording_thread() && cached_template->mode == OpExecutionMode::Streamed)
      write_graph_step(*cached_template, writer, call, storages);
    writer.unlock();
    apply_resized_inputs(in, inputs);
  } catch (const ProtocolError& error) {
    connection.fail_session_and_raise(error);
  }
  const uint32_t* next = storages.data();
  c10::SmallVector<IValue, 4> results;
  for (const OutputSpec& output : op_reply.outputs)
    results.push_back(make_result(output, connection, next, inputs));
  if (!is_repeatable) connection.check_not_recording(op.schema().name().c_str());
  torch::jit::drop(*stack, traits.argument_count);
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace genie
