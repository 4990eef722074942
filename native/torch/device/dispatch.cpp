// Turns a call of an op into a record. The arguments make a key (kinds, shapes, values that matter) and data
// (which storages, offsets, numbers). A key that is known gives the outputs at once; a new one is worked out
// on torch's meta device, or asked of the executor. Not for: ops that are carried out here (kernels.cpp).
#include "dispatch.h"

#include <functional>
#include <set>
#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/to_native.h>
#include <torch/library.h>

#include "errors.h"
#include "generator.h"
#include "roster.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t CALL_BYTES_MAX = FRAME_BYTES_MAX - (256u << 10);
constexpr int ATTEMPTS_MAX = 4;

// --- what is known of an op ---------------------------------------------------------------------

struct OpFacts {
  size_t arguments = 0, returns = 0;
  bool values_are_data = false;  // numbers do not decide about shapes
  bool writes = false;
  bool takes_cpu_index = false;  // CUDA takes CPU tensors as indices here, and so does this device
  bool depends_on_values = false;
  bool meta_is_trusted = true;
  std::vector<bool> is_number, is_written;
};

bool contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) != std::string::npos) return true;
  return false;
}

bool takes_tensor(const c10::Argument& argument) {
  return argument.type()->str().find("Tensor") != std::string::npos;
}

OpFacts facts_from(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  OpFacts facts;
  facts.arguments = schema.arguments().size();
  facts.returns = schema.returns().size();
  facts.writes = schema.is_mutable();
  bool any_tensor = false;
  for (const auto& argument : schema.arguments()) {
    auto type = argument.type();
    if (auto* optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType();
    facts.is_number.push_back(type->kind() == c10::TypeKind::NumberType);
    facts.is_written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    any_tensor |= takes_tensor(argument);
  }
  // Their shapes follow from numbers.
  facts.values_are_data = any_tensor && !contains(name, {"upsample", "arange", "range", "linspace",
                                                         "logspace", "hist", "_fused_sdp_choice"});
  facts.takes_cpu_index = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
                          contains(name, {"_unsafe_index", "aten::_unsafe_masked"});
  facts.depends_on_values =
      op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  // Their kernels give other shapes than the meta functions say, depending on the accelerator.
  facts.meta_is_trusted =
      !contains(name, {"batch_norm", "embedding_bag", "_scaled_dot_product", "_flash_attention",
                       "_efficient_attention", "_cudnn", "miopen", "_thnn", "ctc_loss", "layer_norm",
                       "multilabel_margin_loss", "log_sigmoid", "_fused_sdp_choice"});
  return facts;
}

// Schemas live as long as the process, so their address names them.
const OpFacts& facts_of(const c10::OperatorHandle& op) {
  struct Entry {
    const void* schema = nullptr;
    const OpFacts* facts = nullptr;
  };
  static thread_local Entry cache[1024];
  const void* schema = &op.schema();
  Entry& entry = cache[(reinterpret_cast<uintptr_t>(schema) >> 6) & 1023];
  if (entry.schema == schema) return *entry.facts;
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const void*, OpFacts>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = all->find(schema);
  if (found == all->end()) found = all->emplace(schema, facts_from(op)).first;
  entry = {schema, &found->second};
  return found->second;
}

// --- the key and the data of a call -------------------------------------------------------------

struct Call {
  std::vector<int64_t> key;
  Writer data;
  std::vector<const Tensor*> tensors;                             // remote ones, in order; owned by the stack
  std::unordered_map<const c10::StorageImpl*, int64_t> first_on;  // storage -> tensor; once there are many
  at::Generator generator;  // at most one; its number stands at `generator_at` of the data
  size_t generator_at = 0;
  Connection* connection = nullptr;
  const Tensor* on_cpu = nullptr;  // a tensor that would have to be moved

  void clear() {
    key.clear();
    data.clear();
    tensors.clear();
    if (!first_on.empty()) first_on.clear();
    generator = at::Generator();
    connection = nullptr;
    on_cpu = nullptr;
  }
};

int64_t word(ArgumentKind kind, int64_t rest = 0) { return static_cast<int64_t>(kind) | rest << 8; }

[[noreturn]] void raise_two_devices(const Connection& first, const c10::Device& second) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
              first.options().device_name, " and ", second, "!");
}

// The first tensor of the call on the same memory, or -1.
int64_t first_sharing(Call& call, const c10::StorageImpl* storage) {
  constexpr size_t FEW = 16;
  if (call.tensors.size() <= FEW) {
    for (size_t i = 0; i < call.tensors.size(); i++) {
      const auto* impl = call.tensors[i]->unsafeGetTensorImpl();
      if (impl->unsafe_storage().unsafeGetStorageImpl() == storage) return static_cast<int64_t>(i);
    }
    return -1;
  }
  if (call.first_on.empty()) {
    for (size_t i = 0; i < call.tensors.size(); i++) {
      const auto* impl = call.tensors[i]->unsafeGetTensorImpl();
      call.first_on.emplace(impl->unsafe_storage().unsafeGetStorageImpl(), static_cast<int64_t>(i));
    }
  }
  auto [found, added] = call.first_on.emplace(storage, static_cast<int64_t>(call.tensors.size()));
  return added ? -1 : found->second;
}

// Which outputs are which inputs depends on inputs being the same, so that is part of the key.
void add_sharing(Call& call, const c10::TensorImpl* impl) {
  int64_t first = first_sharing(call, impl->unsafe_storage().unsafeGetStorageImpl());
  if (first < 0) return;
  bool same = call.tensors[static_cast<size_t>(first)]->unsafeGetTensorImpl() == impl;
  call.key.push_back(-2 * (first + 1) - (same ? 1 : 0));  // no other word is negative at its place
}

void add_remote(Call& call, const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  Handle& handle = handle_of(*impl);
  if (!call.connection) {
    call.connection = handle.connection.get();
  } else if (call.connection != handle.connection.get()) {
    if (handle.connection->lost()) handle.connection->raise_lost();
    if (call.connection->lost()) call.connection->raise_lost();
    raise_two_devices(*call.connection, impl->device());
  }
  int64_t offset = impl->storage_offset();
  auto sizes = impl->sizes(), strides = impl->strides();
  size_t dimensions = sizes.size();
  if (dimensions > DIMENSIONS_MAX) raise("device.op_refused", "a tensor has more than 64 dimensions");
  int64_t flags = (offset ? VIEW_HAS_OFFSET : 0) | (impl->is_conj() ? VIEW_CONJUGATE : 0) |
                  (impl->is_neg() ? VIEW_NEGATIVE : 0);
  call.key.push_back(word(ArgumentKind::Tensor, static_cast<int64_t>(impl->dtype().toScalarType()) |
                                                    flags << 8 | static_cast<int64_t>(dimensions) << 16));
  size_t at = call.key.size();
  call.key.resize(at + 2 * dimensions);
  std::copy(sizes.begin(), sizes.end(), call.key.begin() + static_cast<ptrdiff_t>(at));
  std::copy(strides.begin(), strides.end(), call.key.begin() + static_cast<ptrdiff_t>(at + dimensions));
  add_sharing(call, impl);
  call.data.u32(handle.storage);
  if (offset) call.data.i64(offset);
  call.tensors.push_back(&tensor);
  call.connection->note_use(handle.storage, impl->unsafe_storage());
}

void add_tensor(Call& call, const Tensor& tensor, bool written) {
  if (!tensor.defined()) {
    call.key.push_back(word(ArgumentKind::Undefined));
    return;
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->device().type() == DEVICE_TYPE) {
    add_remote(call, tensor);
  } else if (impl->device().is_cpu() && impl->dim() == 0 && !written && impl->layout() == at::kStrided) {
    call.key.push_back(
        word(ArgumentKind::ScalarTensor, static_cast<int64_t>(impl->dtype().toScalarType()) |
                                             static_cast<int64_t>(impl->is_wrapped_number()) << 8));
    uint8_t* value = call.data.grow(16);
    std::memset(value, 0, 16);
    Tensor plain = tensor.resolve_conj().resolve_neg();
    std::memcpy(value, plain.const_data_ptr(), plain.itemsize());
  } else {
    call.on_cpu = &tensor;
  }
}

void add_text(Call& call, const std::string& text) {
  if (text.size() > TEXT_BYTES_MAX) raise("device.op_refused", "a text is too long to be sent");
  call.key.push_back(word(ArgumentKind::Text, static_cast<int64_t>(text.size())));
  size_t at = call.key.size();
  call.key.resize(at + (text.size() + 7) / 8, 0);
  if (!text.empty()) std::memcpy(&call.key[at], text.data(), text.size());
}

int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// `number_as_data`: an integer that stands for a value; `float_as_data`: likewise for floats.
void add_argument(Call& call, const IValue& value, bool number_as_data, bool float_as_data, bool written) {
  if (value.isTensor()) {
    add_tensor(call, value.toTensor(), written);
  } else if (value.isInt()) {
    call.key.push_back(word(number_as_data ? ArgumentKind::IntegerData : ArgumentKind::Integer));
    number_as_data ? call.data.i64(value.toInt()) : call.key.push_back(value.toInt());
  } else if (value.isNone()) {
    call.key.push_back(word(ArgumentKind::None));
  } else if (value.isDouble()) {
    call.key.push_back(word(float_as_data ? ArgumentKind::FloatData : ArgumentKind::Float));
    float_as_data ? call.data.f64(value.toDouble()) : call.key.push_back(bits_of(value.toDouble()));
  } else if (value.isBool()) {
    call.key.push_back(word(ArgumentKind::Boolean, value.toBool()));
  } else if (value.isList()) {
    auto items = value.toListRef();
    if (items.size() > LIST_ITEMS_MAX) raise("device.op_refused", "a list is too long to be sent");
    call.key.push_back(word(ArgumentKind::List, static_cast<int64_t>(items.size())));
    for (const IValue& item : items) add_argument(call, item, false, false, written);
  } else if (value.isDevice()) {
    call.key.push_back(word(ArgumentKind::OwnDevice));
  } else if (value.isString()) {
    add_text(call, value.toStringRef());
  } else if (value.isSymInt()) {
    call.key.push_back(word(ArgumentKind::Integer));
    call.key.push_back(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else if (value.isComplexDouble()) {
    auto number = value.toComplexDouble();
    call.key.push_back(word(ArgumentKind::Complex));
    call.key.push_back(bits_of(number.real()));
    call.key.push_back(bits_of(number.imag()));
  } else if (value.isGenerator()) {
    call.key.push_back(word(ArgumentKind::Generator));
    call.generator = value.toGenerator();
    call.generator_at = call.data.size();
    call.data.u32(0);  // overwritten when the executor is known
  } else {
    raise("device.op_refused", "an argument of type " + value.tagKind() + " cannot be sent");
  }
}

// --- a template for the executor ----------------------------------------------------------------

void write_argument(Writer& out, const IValue& value, bool number_as_data, bool float_as_data);

void write_tensor_argument(Writer& out, const Tensor& tensor) {
  if (!tensor.defined()) {
    out.u8(static_cast<uint8_t>(ArgumentKind::Undefined));
  } else if (tensor.device().type() == DEVICE_TYPE) {
    out.u8(static_cast<uint8_t>(ArgumentKind::Tensor));
    out.u8(static_cast<uint8_t>(tensor.scalar_type()));
    out.u8(static_cast<uint8_t>(tensor.dim()));
    out.u8((tensor.storage_offset() ? VIEW_HAS_OFFSET : 0) | (tensor.is_conj() ? VIEW_CONJUGATE : 0) |
           (tensor.is_neg() ? VIEW_NEGATIVE : 0));
    for (int64_t size : tensor.sizes()) out.i64(size);
    for (int64_t stride : tensor.strides()) out.i64(stride);
  } else {
    out.u8(static_cast<uint8_t>(ArgumentKind::ScalarTensor));
    out.u8(static_cast<uint8_t>(tensor.scalar_type()));
    out.u8(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  }
}

void write_argument(Writer& out, const IValue& value, bool number_as_data, bool float_as_data) {
  auto kind = [&](ArgumentKind kind) { out.u8(static_cast<uint8_t>(kind)); };
  if (value.isTensor()) {
    write_tensor_argument(out, value.toTensor());
  } else if (value.isInt()) {
    kind(number_as_data ? ArgumentKind::IntegerData : ArgumentKind::Integer);
    if (!number_as_data) out.i64(value.toInt());
  } else if (value.isNone()) {
    kind(ArgumentKind::None);
  } else if (value.isDouble()) {
    kind(float_as_data ? ArgumentKind::FloatData : ArgumentKind::Float);
    if (!float_as_data) out.f64(value.toDouble());
  } else if (value.isBool()) {
    kind(ArgumentKind::Boolean);
    out.u8(value.toBool());
  } else if (value.isList()) {
    kind(ArgumentKind::List);
    auto items = value.toListRef();
    out.u32(static_cast<uint32_t>(items.size()));
    for (const IValue& item : items) write_argument(out, item, false, false);
  } else if (value.isDevice()) {
    kind(ArgumentKind::OwnDevice);
  } else if (value.isString()) {
    kind(ArgumentKind::Text);
    out.text(value.toStringRef());
  } else if (value.isSymInt()) {
    kind(ArgumentKind::Integer);
    out.i64(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else if (value.isComplexDouble()) {
    kind(ArgumentKind::Complex);
    out.f64(value.toComplexDouble().real());
    out.f64(value.toComplexDouble().imag());
  } else {
    kind(ArgumentKind::Generator);
  }
}

void write_output(Writer& out, const Output& output) {
  out.u8(static_cast<uint8_t>(output.kind));
  if (output.kind == OutputKind::New) {
    out.u8(static_cast<uint8_t>(output.dtype));
    out.u8(static_cast<uint8_t>(output.sizes.size()));
    for (int64_t size : output.sizes) out.i64(size);
    for (int64_t stride : output.strides) out.i64(stride);
  } else if (output.kind == OutputKind::Same) {
    out.u32(static_cast<uint32_t>(output.source));
  } else if (output.kind == OutputKind::List) {
    out.u32(static_cast<uint32_t>(output.items.size()));
    for (const Output& item : output.items) write_output(out, item);
  } else if (output.kind == OutputKind::Integer) {
    out.i64(output.constant.toInt());
  }
}

Writer template_body(const c10::OperatorHandle& op, const OpFacts& facts, const Stack& stack, size_t base,
                     const std::vector<Output>* outputs) {
  Writer body;
  body.text(op.schema().name());
  body.text(op.schema().overload_name());
  body.u32(static_cast<uint32_t>(facts.arguments));
  for (size_t i = 0; i < facts.arguments; i++) {
    write_argument(body, stack[base + i], facts.is_number[i] && facts.values_are_data, facts.values_are_data);
  }
  body.u8(outputs != nullptr);
  if (outputs) {
    body.u32(static_cast<uint32_t>(outputs->size()));
    for (const Output& output : *outputs) write_output(body, output);
  }
  return body;
}

void write_template(Writer& records, uint32_t number, const Writer& body) {
  records.record(Record::Template, number);
  records.u32(static_cast<uint32_t>(body.size()));
  records.raw(body.data(), body.size());
}

// --- outputs from the meta device ---------------------------------------------------------------

// The remote tensors of a call and what stands for them on the meta device.
struct MetaTwins {
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;
  std::vector<std::pair<Tensor, Tensor>> tensors;

  Tensor of(const Tensor& real) {
    for (auto& [known, twin] : tensors)
      if (known.unsafeGetTensorImpl() == real.unsafeGetTensorImpl()) return twin;
    const auto* storage = real.storage().unsafeGetStorageImpl();
    auto found = storages.find(storage);
    if (found == storages.end()) {
      auto bytes = static_cast<int64_t>(real.storage().nbytes());
      Tensor whole = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kMeta));
      found = storages.emplace(storage, whole.storage()).first;
    }
    Tensor twin = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::Meta), real.dtype());
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(real.sizes(), real.strides(), real.storage_offset());
    if (real.is_conj()) twin._set_conj(true);
    if (real.is_neg()) twin._set_neg(true);
    tensors.emplace_back(real, twin);
    return twin;
  }

  IValue of_value(const IValue& value) {
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      return tensor.defined() && tensor.device().type() == DEVICE_TYPE ? IValue(of(tensor)) : value;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::Meta);
    if (value.isGenerator()) return IValue();
    if (value.isList()) {
      auto items = value.toList();
      c10::impl::GenericList twins(items.elementType());
      for (size_t i = 0; i < items.size(); i++) twins.push_back(of_value(items.get(i)));
      return twins;
    }
    return value;
  }
};

// The executor can tell, where the meta device cannot.
struct NotKnownHere : std::exception {};

Output output_from_meta(const IValue& value, const MetaTwins& twins,
                        const std::vector<const Tensor*>& inputs);

int index_of(const std::vector<const Tensor*>& inputs, const Tensor& real) {
  for (size_t i = 0; i < inputs.size(); i++)
    if (inputs[i]->unsafeGetTensorImpl() == real.unsafeGetTensorImpl()) return static_cast<int>(i);
  throw NotKnownHere();
}

Output tensor_from_meta(const Tensor& made, const MetaTwins& twins,
                        const std::vector<const Tensor*>& inputs) {
  Output output;
  if (!made.defined()) return output;
  if (!made.is_meta() || made.layout() != at::kStrided || !is_carried(made.scalar_type()))
    throw NotKnownHere();
  for (const auto& [real, twin] : twins.tensors) {
    if (twin.unsafeGetTensorImpl() != made.unsafeGetTensorImpl()) continue;
    output.kind = OutputKind::Same;
    output.source = index_of(inputs, real);
    return output;
  }
  output.kind = OutputKind::New;
  output.dtype = made.scalar_type();
  output.sizes.assign(made.sizes().begin(), made.sizes().end());
  output.strides.assign(made.strides().begin(), made.strides().end());
  output.contiguous = made.is_contiguous();
  for (const auto& [real, twin] : twins.tensors) {
    if (twin.storage().unsafeGetStorageImpl() != made.storage().unsafeGetStorageImpl()) continue;
    output.view = true;
    output.source = index_of(inputs, real);
    output.offset = made.storage_offset() - twin.storage_offset();
    return output;
  }
  if (made.storage_offset() || made.is_conj() || made.is_neg()) throw NotKnownHere();
  output.storage_bytes =
      static_cast<int64_t>(at::detail::computeStorageNbytes(made.sizes(), made.strides(), made.itemsize()));
  return output;
}

Output output_from_meta(const IValue& value, const MetaTwins& twins,
                        const std::vector<const Tensor*>& inputs) {
  if (value.isTensor()) return tensor_from_meta(value.toTensor(), twins, inputs);
  Output output;
  if (value.isList()) {
    output.kind = OutputKind::List;
    for (const IValue& item : value.toListRef())
      output.items.push_back(output_from_meta(item, twins, inputs));
    output.constant = c10::impl::GenericList(value.toList().elementType());
  } else if (value.isNone()) {
    output.constant = value;
  } else if (value.isInt() || value.isSymInt()) {
    output.kind = OutputKind::Integer;
    output.constant = value.isInt() ? value : IValue(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else {
    throw NotKnownHere();
  }
  return output;
}

// Ops with `out=` give it another shape; so does this, before the op is sent. True when one was changed.
bool follow_resizes(const MetaTwins& twins) {
  bool any = false;
  for (const auto& [real, twin] : twins.tensors) {
    if (twin.sizes() == real.sizes() && twin.strides() == real.strides()) continue;
    auto* impl = real.unsafeGetTensorImpl();
    auto bytes = at::detail::computeStorageNbytes(twin.sizes(), twin.strides(), twin.itemsize(),
                                                  real.storage_offset());
    if (bytes > real.storage().nbytes()) resize_storage(*real.storage().unsafeGetStorageImpl(), bytes);
    impl->set_sizes_and_strides(twin.sizes(), twin.strides());
    any = true;
  }
  return any;
}

struct Worked {
  Way way = Way::Ask;
  bool resized = false;
  std::vector<Output> outputs;
};

bool only_views(const Output& output) {
  if (output.kind != OutputKind::List) return output.view || output.kind == OutputKind::Same;
  for (const Output& item : output.items)
    if (!only_views(item)) return false;
  return true;
}

bool any_view(const Output& output) {
  for (const Output& item : output.items)
    if (any_view(item)) return true;
  return output.view;
}

Way way_of(const OpFacts& facts, const std::vector<Output>& outputs) {
  bool all_local = !facts.writes && !outputs.empty(), views = false;
  for (const Output& output : outputs) {
    all_local &= only_views(output);
    views |= any_view(output);
  }
  if (all_local) return Way::Local;
  return views ? Way::Ask : Way::Stream;
}

Worked work_out(const c10::OperatorHandle& op, const OpFacts& facts, const Stack& stack, size_t base,
                const std::vector<const Tensor*>& inputs) {
  Worked worked;
  Way otherwise = facts.depends_on_values ? Way::Ask : Way::Learn;
  worked.way = otherwise;
  if (facts.depends_on_values || !facts.meta_is_trusted) return worked;
  MetaTwins twins;
  Stack meta;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < facts.arguments; i++) meta.push_back(twins.of_value(stack[base + i]));
    op.callBoxed(&meta);
  } catch (const std::exception&) {
    return worked;  // the executor says what is wrong, or does what the meta device cannot
  }
  if (follow_resizes(twins)) {
    worked.resized = true;
    return worked;
  }
  try {
    for (size_t i = 0; i < facts.returns; i++) {
      worked.outputs.push_back(output_from_meta(meta[meta.size() - facts.returns + i], twins, inputs));
    }
    worked.way = way_of(facts, worked.outputs);
  } catch (const NotKnownHere&) {
    worked.outputs.clear();
  }
  return worked;
}

// --- results ------------------------------------------------------------------------------------

uint32_t count_new(const Output& output) {
  uint32_t count = output.kind == OutputKind::New && !output.view;
  for (const Output& item : output.items) count += count_new(item);
  return count;
}

IValue make_result(const Output& output, Connection& connection, const uint32_t*& storages,
                   const std::vector<Tensor>& inputs) {
  switch (output.kind) {
    case OutputKind::New:
      if (output.view) return make_view(inputs[static_cast<size_t>(output.source)], output);
      return make_tensor(connection, *storages++, output);
    case OutputKind::Same:
      return inputs[static_cast<size_t>(output.source)];
    case OutputKind::List: {
      c10::impl::GenericList items(output.constant.toList().elementType());
      for (const Output& item : output.items)
        items.push_back(make_result(item, connection, storages, inputs));
      return items;
    }
    case OutputKind::None:
      return output.constant.isNone() ? IValue(Tensor()) : output.constant;
    default:
      return output.constant;
  }
}

std::vector<Tensor> copied(const std::vector<const Tensor*>& tensors) {
  std::vector<Tensor> copies;
  copies.reserve(tensors.size());
  for (const Tensor* tensor : tensors) copies.push_back(*tensor);
  return copies;
}

void leave_results(const std::vector<Output>& outputs, Connection& connection, const uint32_t* storages,
                   const Call& call, const OpFacts& facts, Stack* stack) {
  if (outputs.size() == 1 && outputs[0].kind == OutputKind::New && !outputs[0].view) {
    Tensor made = make_tensor(connection, *storages, outputs[0]);
    torch::jit::drop(*stack, facts.arguments);
    stack->emplace_back(std::move(made));
    return;
  }
  if (outputs.size() == 1 && outputs[0].kind == OutputKind::Same) {
    Tensor same = *call.tensors[static_cast<size_t>(outputs[0].source)];
    torch::jit::drop(*stack, facts.arguments);
    stack->emplace_back(std::move(same));
    return;
  }
  std::vector<Tensor> inputs = copied(call.tensors);
  c10::SmallVector<IValue, 4> results;
  for (const Output& output : outputs) results.push_back(make_result(output, connection, storages, inputs));
  torch::jit::drop(*stack, facts.arguments);
  for (IValue& result : results) stack->push_back(std::move(result));
}

// --- asking -------------------------------------------------------------------------------------

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
    } catch (...) {
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

// --- a call -------------------------------------------------------------------------------------

// An index may be a CPU tensor; it goes along.
void move_to(Stack* stack, size_t base, size_t count, c10::Device device) {
  auto moved = [&](const IValue& value) -> IValue {
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    const Tensor& tensor = value.toTensor();
    return tensor.device().is_cpu() && tensor.dim() > 0 ? IValue(tensor.to(device)) : value;
  };
  for (size_t i = base; i < base + count; i++) {
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

// A call without a remote tensor says by its device argument where it goes.
ConnectionPtr connection_by_argument(const Stack& stack, size_t base, const OpFacts& facts) {
  int index = -1;
  for (size_t i = 0; i < facts.arguments; i++) {
    const IValue& value = stack[base + i];
    if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) index = value.toDevice().index();
  }
  return roster().connection(index);
}

constexpr uint32_t NODES_LEARNED = 16;

size_t count_outputs(const std::vector<Output>& outputs) {
  size_t count = outputs.size();
  for (const Output& output : outputs) count += count_outputs(output.items);
  return count;
}

uint32_t nodes_of(const Stack& stack, size_t base, const OpFacts& facts) {
  size_t count = facts.arguments;
  for (size_t i = 0; i < facts.arguments; i++) {
    const IValue& value = stack[base + i];
    if (value.isList()) count += value.toListRef().size();
  }
  return static_cast<uint32_t>(count);
}

TemplatePtr make_template(const c10::OperatorHandle& op, const OpFacts& facts, const Stack& stack,
                          size_t base, const Call& call, uint64_t hash, Connection::Batch& batch,
                          bool& resized) {
  auto made = c10::make_intrusive<Template>();
  made->key = call.key;
  made->hash = hash;
  batch.release();
  Worked worked = work_out(op, facts, stack, base, call.tensors);
  resized = worked.resized;
  if (resized) return {};
  made->way = worked.way;
  made->outputs = std::move(worked.outputs);
  for (const Output& output : made->outputs) made->new_outputs += count_new(output);
  Writer body;
  if (made->way != Way::Local) {
    body = template_body(op, facts, stack, base, made->way == Way::Stream ? &made->outputs : nullptr);
    if (body.size() + call.data.size() > CALL_BYTES_MAX) {
      raise("device.op_refused", op.schema().name() + " has too many arguments to be sent");
    }
    made->nodes =
        nodes_of(stack, base, facts) + static_cast<uint32_t>(count_outputs(made->outputs)) + NODES_LEARNED;
  }
  batch.acquire();
  batch.counters().misses++;
  batch.templates().insert(made, batch.records());
  if (made->way != Way::Local) write_template(batch.records(), made->number, body);
  return made;
}

void stream(const TemplatePtr& known, Connection::Batch& batch, const Call& call, const OpFacts& facts,
            Stack* stack) {
  Connection& connection = *call.connection;
  uint32_t few[8];
  std::vector<uint32_t> many;
  uint32_t* storages = few;
  if (known->new_outputs > 8) {
    many.resize(known->new_outputs);
    storages = many.data();
  }
  if (known->way == Way::Local) {
    batch.release();
  } else {
    for (uint32_t i = 0; i < known->new_outputs; i++) storages[i] = batch.new_storage();
    Writer& records = batch.records();
    records.record(Record::Op, known->number);
    records.raw(call.data.data(), call.data.size());
    records.raw(storages, known->new_outputs * sizeof(uint32_t));
    batch.finish_op();
  }
  bool wait = connection.options().blocking && known->way != Way::Local && !connection.is_recorder();
  ConnectionPtr kept = wait ? ConnectionPtr::reclaim_copy(&connection) : ConnectionPtr();
  leave_results(known->outputs, connection, storages, call, facts, stack);
  if (wait) kept->synchronize();
}

}  // namespace

void send_op(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const OpFacts& facts = facts_of(op);
  size_t base = stack->size() - facts.arguments;
  static thread_local Call scratch;
  for (int attempt = 0; attempt < ATTEMPTS_MAX; attempt++) {
    Call call = std::move(scratch);  // an op may be called while another is being worked out
    call.clear();
    call.key.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(&op.schema())));
    for (size_t i = 0; i < facts.arguments; i++) {
      add_argument(call, (*stack)[base + i], facts.is_number[i] && facts.values_are_data,
                   facts.values_are_data, facts.is_written[i]);
    }
    ConnectionPtr by_argument;
    if (!call.connection) {
      by_argument = connection_by_argument(*stack, base, facts);
      call.connection = by_argument.get();
    }
    if (call.on_cpu) {
      if (!facts.takes_cpu_index || attempt > 0) raise_two_devices(*call.connection, call.on_cpu->device());
      c10::Device there(DEVICE_TYPE, static_cast<c10::DeviceIndex>(call.connection->options().index));
      move_to(stack, base, facts.arguments, there);
      scratch = std::move(call);
      continue;
    }
    if (call.generator.defined()) {
      call.data.overwrite_u32(call.generator_at, generator_number(call.generator, *call.connection));
    }
    uint64_t hash = hash_of(call.key);
    Connection::Batch batch(*call.connection);
    TemplatePtr known = batch.templates().find(hash, call.key);
    if (!known) {
      bool resized = false;
      known = make_template(op, facts, *stack, base, call, hash, batch, resized);
      if (resized) {
        scratch = std::move(call);
        continue;
      }
    }
    if (known->way == Way::Ask || known->way == Way::Learn) {
      if (known->way == Way::Ask) call.connection->check_not_recording(op.schema().name().c_str());
      ask(op, facts, known, batch, call, stack);
    } else {
      stream(known, batch, call, facts, stack);
    }
    scratch = std::move(call);
    return;
  }
  raise("device.op_refused", op.schema().name() + ": its outputs keep changing their shape");
}

// --- registration -------------------------------------------------------------------------------

namespace {

// They are right as torch composes them: views, bookkeeping, and what is made of empty and copy_.
const std::set<std::string>& composed() {
  static const std::set<std::string> names = {
      "aten::detach", "aten::alias", "aten::_to_copy", "aten::empty_like", "aten::lift", "aten::lift_fresh",
      "aten::_unsafe_view", "aten::is_pinned", "aten::_pin_memory", "aten::set_data",
      "aten::_efficientzerotensor", "aten::_lazy_clone", "aten::split_with_sizes", "aten::split",
      "aten::unbind", "aten::resize_as_", "aten::resize", "aten::set", "aten::is_same_size",
      "aten::_nested_tensor_size",
      // executors do not take indices on trust; these are made of ops that check them
      "aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate"};
  return names;
}

bool gives_view(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

bool goes_whole(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (op.hasKernelForDispatchKey(Key::PrivateUse1) || composed().count(name) ||
      op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  bool functional = op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
  if (!functional && !op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd)) return false;
  if (schema.returns().empty() || gives_view(schema)) return false;
  if (contains(name, {"sparse", "nested", "_like", "new_"})) return false;
  bool any_tensor = false;
  for (const auto& argument : schema.arguments()) any_tensor |= takes_tensor(argument);
  if (!any_tensor) return false;
  // torch makes `out=` variants of functional ops by copying; sending those whole gains nothing.
  bool has_kernel = functional || op.hasKernelForDispatchKey(Key::CPU);
  return has_kernel || schema.overload_name().find("out") == std::string::npos;
}

}  // namespace

int register_ops() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !goes_whole(*op)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&send_op>());
    count++;
  }
  return count;
}

}  // namespace genie

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&genie::send_op>());
}
