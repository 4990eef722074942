// See asking.h.
#include "asking.h"

#include <ATen/EmptyTensor.h>

#include "results.h"
#include "template_body.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

void check_not_negative(c10::IntArrayRef values) {
  for (int64_t value : values)
    if (value < 0) throw ProtocolError("a size or a stride is negative");
}

Output read_output(Reader& in, const c10::TypePtr& type, bool in_list = false) {
  Output output;
  output.kind = static_cast<OutputKind>(in.u8());
  switch (output.kind) {
    case OutputKind::None:
      break;
    case OutputKind::New: {
      output.dtype = static_cast<c10::ScalarType>(in.u8());
      size_t dimensions = in.u8();
      if (!is_carried(output.dtype) || dimensions > DIMENSIONS_MAX)
        throw ProtocolError("an output is malformed");
      for (size_t i = 0; i < dimensions; i++) output.sizes.push_back(in.i64());
      for (size_t i = 0; i < dimensions; i++) output.strides.push_back(in.i64());
      check_not_negative(output.sizes);
      check_not_negative(output.strides);
      output.storage_bytes = static_cast<int64_t>(
          at::detail::computeStorageNbytes(output.sizes, output.strides, c10::elementSize(output.dtype)));
      break;
    }
    case OutputKind::Same:
      output.source = static_cast<int>(in.u32());
      break;
    case OutputKind::List: {
      uint32_t count = in.u32();
      if (in_list || count > LIST_ITEMS_MAX) throw ProtocolError("an output is malformed");
      auto* list = type->castRaw<c10::ListType>();
      c10::TypePtr element = list ? list->getElementType() : c10::TypePtr(c10::TensorType::get());
      for (uint32_t i = 0; i < count; i++) output.items.push_back(read_output(in, element, true));
      output.constant = c10::impl::GenericList(element);
      break;
    }
    case OutputKind::Integer:
      output.constant = in.i64();
      break;
    case OutputKind::Float:
      output.constant = in.f64();
      break;
    case OutputKind::Boolean:
      output.constant = in.u8() != 0;
      break;
    case OutputKind::Complex: {
      double real = in.f64();
      output.constant = c10::complex<double>(real, in.f64());
      break;
    }
    default:
      throw ProtocolError("an output is of an unknown kind");
  }
  return output;
}

void check_sources(const Output& output, size_t inputs) {
  if (output.kind == OutputKind::Same && static_cast<size_t>(output.source) >= inputs) {
    throw ProtocolError("an output names an input that is not there");
  }
  for (const Output& item : output.items) check_sources(item, inputs);
}

// Inputs that the op has given another shape.
void read_changes(Reader& in, const std::vector<Tensor>& inputs) {
  for (uint32_t left = in.u32(); left > 0; left--) {
    uint32_t index = in.u32();
    uint64_t bytes = in.u64();
    size_t dimensions = in.u8();
    if (index >= inputs.size() || dimensions > DIMENSIONS_MAX) throw ProtocolError("a change is malformed");
    int64_t offset = in.i64();
    std::vector<int64_t> sizes, strides;
    for (size_t i = 0; i < dimensions; i++) sizes.push_back(in.i64());
    for (size_t i = 0; i < dimensions; i++) strides.push_back(in.i64());
    check_not_negative(sizes);
    check_not_negative(strides);
    inputs[index].storage().unsafeGetStorageImpl()->set_nbytes(bytes);
    inputs[index].unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  }
}

bool can_be_learned(const std::vector<Output>& outputs, bool changed) {
  if (changed) return false;
  for (const Output& output : outputs) {
    if (output.kind > OutputKind::Integer) return false;  // a value, not a shape
    if (!can_be_learned(output.items, false)) return false;
  }
  return true;
}

struct Answer {
  std::vector<Output> outputs;
  uint32_t made = 0;
  bool changes = false;
};

Answer read_answer(Reader& in, const c10::FunctionSchema& schema, size_t inputs) {
  Answer answer;
  if (in.u32() != schema.returns().size())
    throw ProtocolError("an answer has another number of outputs than the op");
  for (const auto& returned : schema.returns()) {
    answer.outputs.push_back(read_output(in, returned.type()));
    check_sources(answer.outputs.back(), inputs);
    answer.made += count_new(answer.outputs.back());
  }
  answer.changes = Reader(in).u32() > 0;
  return answer;
}

// An op that only tells something about shapes need not be sent again.
bool is_constant(const OpFacts& facts, const std::vector<Output>& outputs) {
  if (facts.writes || outputs.empty()) return false;
  for (const Output& output : outputs)
    if (output.kind != OutputKind::Integer) return false;
  return true;
}

// From now on the op is streamed with what the executor has shown that it gives.
void learn(const c10::OperatorHandle& op, const OpFacts& facts, Template& known, const Answer& answer,
           Connection::Batch& batch, const Stack& stack) {
  batch.templates().renumber(known, batch.records());
  known.outputs = answer.outputs;
  known.new_outputs = answer.made;
  known.way = is_constant(facts, answer.outputs) ? Way::Local : Way::Stream;
  if (known.way == Way::Local) return;
  write_template(batch.records(), known.number,
                 template_body(op, facts, stack, stack.size() - facts.arguments, &answer.outputs));
}

// What was asked while a graph is recorded becomes one of its steps, now that its outputs are known.
void write_step(const Template& known, Connection::Batch& batch, const Call& call,
                const std::vector<uint32_t>& storages) {
  batch.records().record(Record::GraphStep, known.number);
  batch.records().raw(call.data.data(), call.data.size());
  batch.records().raw(storages.data(), storages.size() * sizeof(uint32_t));
}

}  // namespace

void ask(const c10::OperatorHandle& op, const OpFacts& facts, const TemplatePtr& known,
         Connection::Batch& batch, const Call& call, Stack* stack) {
  Connection& connection = *call.connection;
  std::vector<Tensor> inputs = copied(call.tensors);
  Awaited awaited;
  awaited.binds = true;
  batch.records().record(Record::Ask, known->number);
  batch.records().raw(call.data.data(), call.data.size());
  batch.counters().asks++;
  batch.counters().ops++;
  uint64_t number = batch.finish_ask(awaited);
  connection.await(number, awaited);
  Reader in(awaited.payload.data(), awaited.payload.size());
  Answer answer;
  std::vector<uint32_t> storages;
  try {
    answer = read_answer(in, op.schema(), inputs.size());
    try {
      batch.acquire();
      batch.check_new_storages(answer.made);
    } catch (...) {
      batch.release();
      connection.drop_answer(number, answer.made);
      throw;
    }
    storages.resize(answer.made);
    for (uint32_t& storage : storages) storage = batch.new_storage();
    batch.records().record(Record::Bind, answer.made);
    batch.records().u64(number);
    batch.records().raw(storages.data(), storages.size() * sizeof(uint32_t));
    // While this waited, the template may have made room for others.
    bool kept = batch.templates().find(known->hash, known->key) == known;
    if (kept && known->way == Way::Learn && can_be_learned(answer.outputs, answer.changes)) {
      learn(op, facts, *known, answer, batch, *stack);
    }
    if (connection.is_recorder() && known->way == Way::Stream) write_step(*known, batch, call, storages);
    batch.release();
    read_changes(in, inputs);
  } catch (const ProtocolError& error) {
    connection.fail(error);
  }
  const uint32_t* next = storages.data();
  c10::SmallVector<IValue, 4> results;
  for (const Output& output : answer.outputs)
    results.push_back(make_result(output, connection, next, inputs));
  if (known->way == Way::Ask || known->way == Way::Learn) {
    connection.check_not_recording(op.schema().name().c_str());
  }
  torch::jit::drop(*stack, facts.arguments);
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace genie
