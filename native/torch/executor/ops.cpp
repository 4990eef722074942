#include "ops.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

namespace genie {

namespace {

using c10::IValue;

uint32_t storage_at(const uint8_t* numbers, uint32_t index) {
  const uint8_t* place = numbers + sizeof(uint32_t) * index;
  return next_data<uint32_t>(place);
}

// Nobody but whoever holds it has this tensor or its memory.
bool is_unshared(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.unsafeGetTensorImpl()->unsafe_storage().use_count() == 1;
}

void check_readable(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided || !is_carried(tensor.scalar_type()) ||
      tensor.dim() > static_cast<int64_t>(DIMENSIONS_MAX)) {
    throw Refused("the result is a tensor that the wire does not carry: " +
                  described(tensor.scalar_type(), tensor.sizes()));
  }
  if (!tensor._is_zerotensor() && end_bytes(tensor) > tensor.storage().nbytes()) {
    throw Refused("the result reaches beyond the memory that it stands on");
  }
}

uint64_t own_bytes(const std::vector<at::Tensor>& tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.storage().nbytes();
  return bytes;
}

}  // namespace

// --- the call -----------------------------------------------------------------------------------

void OpRunner::call(Template& call, const uint8_t* data) {
  if (!call.op) throw Refused(call.refusal);
  storages_.check_room(std::max(call.new_bytes, call.announced_bytes));
  for (Argument& argument : call.arguments) stack_.push_back(value_of(argument, data));
  if (call.size_argument >= 0) check_announced(call);
  call.op->callBoxed(&stack_);
}

IValue OpRunner::value_of(Argument& argument, const uint8_t*& data) {
  switch (argument.kind) {
    case ArgumentKind::Tensor:
      return give(argument, data);
    case ArgumentKind::ScalarTensor:
      return fill_scalar(argument, data);
    case ArgumentKind::IntegerData:
      return next_data<int64_t>(data);
    case ArgumentKind::FloatData:
      return next_data<double>(data);
    case ArgumentKind::Generator:
      return generators_.get(next_data<uint32_t>(data));
    case ArgumentKind::List: {
      c10::impl::GenericList list(argument.item_type);
      list.reserve(argument.items.size());
      for (Argument& item : argument.items) list.push_back(value_of(item, data));
      return list;
    }
    default:
      return argument.constant;
  }
}

const at::Tensor& OpRunner::give(const Argument& argument, const uint8_t*& data) {
  Slot& slot = storages_.known(next_data<uint32_t>(data));
  int64_t offset = argument.has_offset ? next_data<int64_t>(data) : 0;
  given_.push_back({{}, &slot, argument.look.get(), offset, argument.written});
  given_.back().tensor = storages_.view(slot, *argument.look, offset);
  if (argument.written) outbox_.before_write(slot.storage);
  return given_.back().tensor;
}

const at::Tensor& OpRunner::fill_scalar(Argument& argument, const uint8_t*& data) {
  if (argument.scalar.use_count() > 1) {
    // The last op with this template has kept it.
    bool wrapped = argument.scalar.unsafeGetTensorImpl()->is_wrapped_number();
    argument.scalar = argument.scalar.clone();
    argument.scalar.unsafeGetTensorImpl()->set_wrapped_number(wrapped);
  }
  std::memcpy(argument.scalar.mutable_data_ptr(), data, argument.scalar.itemsize());
  data += SCALAR_BYTES;
  return argument.scalar;
}

bool OpRunner::is_changed(const Given& given) const {
  const c10::Storage& storage = given.tensor.unsafeGetTensorImpl()->unsafe_storage();
  return !given.look->fits(given.tensor, given.offset) || !storage.is_alias_of(given.slot->storage) ||
         storage.nbytes() != given.slot->bytes;
}

void OpRunner::restore_written() noexcept {
  for (Given& given : given_) {
    if (!given.written || !given.tensor.defined()) continue;
    bool changed = is_changed(given) || given.slot->storage.nbytes() != given.slot->bytes;
    given.tensor.reset();
    if (changed) storages_.restore(*given.slot);
  }
}

void OpRunner::let_go() {
  stack_.clear();
  given_.clear();
  made_.clear();
}

void OpRunner::clear() {
  let_go();
  unbound_.clear();
}

// --- an op whose outputs are predicted ----------------------------------------------------------

FailurePtr OpRunner::run(Template& template_, Reader& in) {
  if (!template_.predicted) throw ProtocolError("an op was sent whose outputs are not predicted");
  const uint8_t* data = in.take(template_.data_bytes);
  const uint8_t* new_storages = in.take(sizeof(uint32_t) * template_.new_outputs);
  count_.store(count() + 1, std::memory_order_relaxed);
  for (uint32_t i = 0; i < template_.new_outputs; i++) storages_.check_free(storage_at(new_storages, i));
  try {
    call(template_, data);
    check_unchanged();
    for (size_t i = 0; i < template_.outputs.size(); i++) collect(template_.outputs[i], stack_[i]);
    for (uint32_t i = 0; i < template_.new_outputs; i++) {
      storages_.keep(storage_at(new_storages, i), std::move(made_[i]));
    }
    let_go();
    return nullptr;
  } catch (...) {
    return fail(template_, data, new_storages);
  }
}

void OpRunner::check_unchanged() const {
  for (const Given& given : given_) {
    if (given.written && is_changed(given)) {
      throw Mispredicted("predicted " + described(given.look->dtype, given.look->sizes) +
                         " to stay as it is, got " +
                         described(given.tensor.scalar_type(), given.tensor.sizes()));
    }
  }
}

void OpRunner::collect(const Output& predicted, const IValue& value) {
  switch (predicted.kind) {
    case OutputKind::New:
      if (!value.isTensor() || !value.toTensor().defined()) {
        throw Mispredicted("predicted a tensor, got none");
      }
      made_.push_back(as_predicted(value.toTensor(), predicted.look));
      break;
    case OutputKind::None:
      if (!value.isNone() && !(value.isTensor() && !value.toTensor().defined())) {
        throw Mispredicted("predicted nothing, got a " + value.tagKind());
      }
      break;
    case OutputKind::Same:
      check_same(predicted, value);
      break;
    case OutputKind::Integer:
      if (!value.isInt() || value.toInt() != predicted.integer) {
        throw Mispredicted("predicted " + std::to_string(predicted.integer) + ", got another number");
      }
      break;
    default: {
      if (!value.isList()) throw Mispredicted("predicted a list, got a " + value.tagKind());
      auto items = value.toListRef();
      if (items.size() != predicted.items.size()) {
        throw Mispredicted("predicted " + std::to_string(predicted.items.size()) + " items, got " +
                           std::to_string(items.size()));
      }
      for (size_t i = 0; i < items.size(); i++) collect(predicted.items[i], items[i]);
    }
  }
}

at::Tensor OpRunner::as_predicted(const at::Tensor& found, const Look& predicted) const {
  const c10::TensorImpl& impl = *found.unsafeGetTensorImpl();
  if (impl.dtype().toScalarType() != predicted.dtype || impl.sizes() != c10::IntArrayRef(predicted.sizes)) {
    throw Mispredicted("predicted " + described(predicted.dtype, predicted.sizes) + ", got " +
                       described(found.scalar_type(), found.sizes()));
  }
  bool plain = storages_.is_plain(found) || (found.device().is_cpu() && found.dim() == 0 && !found.is_neg() &&
                                             !found.is_conj() && !found._is_zerotensor());
  if (plain && impl.storage_offset() == 0 && impl.strides() == c10::IntArrayRef(predicted.strides) &&
      is_unshared(found) && predicted.span_bytes <= impl.unsafe_storage().nbytes()) {
    return found;
  }
  check_readable(found);
  auto options = at::TensorOptions().dtype(predicted.dtype).device(storages_.device());
  at::Tensor copy = at::empty_strided(predicted.sizes, predicted.strides, options);
  if (found._is_zerotensor()) {
    copy.zero_();
  } else {
    copy.copy_(found);
  }
  return copy;
}

void OpRunner::check_same(const Output& predicted, const IValue& value) const {
  const Given& given = given_[predicted.index];
  if (value.isTensor() && value.toTensor().is_same(given.tensor)) return;
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().layout() == c10::kStrided &&
      value.toTensor().storage().is_alias_of(given.slot->storage) &&
      given.look->fits(value.toTensor(), given.offset)) {
    return;
  }
  throw Mispredicted("predicted a tensor that was given, got another");
}

// Whether the op should have written to a tensor that can be used.
bool OpRunner::reaches_healthy(const std::vector<Argument>& arguments, const uint8_t* data) {
  bool found = false;
  each_tensor(arguments, data, [&](const Argument& argument, uint32_t storage) {
    const Slot& slot = storages_.known(storage);
    found = found || (argument.written && !slot.failure);
  });
  return found;
}

FailurePtr OpRunner::fail(const Template& template_, const uint8_t* data, const uint8_t* new_storages) {
  FailurePtr failure = failure_at_hand(template_.name, count());
  // Poison that is passed on was told of when it arose, but a tensor that keeps its old values was not.
  bool news = failure->number == count() || reaches_healthy(template_.arguments, data);
  restore_written();
  let_go();
  for (uint32_t i = 0; i < template_.new_outputs; i++) storages_.poison(storage_at(new_storages, i), failure);
  return news ? failure : nullptr;
}

// --- an op that is asked ------------------------------------------------------------------------

void OpRunner::pass_over(const Template& template_, Reader& in) {
  in.take(template_.data_bytes);
  count_.store(count() + 1, std::memory_order_relaxed);
}

FailurePtr OpRunner::ask(Template& template_, Reader& in, uint64_t reply_number, Writer& reply) {
  if (template_.predicted) throw ProtocolError("an op was asked whose outputs are predicted");
  if (unbound_.size() >= ASKS_UNBOUND_MAX) throw ProtocolError("the client asks for more than it binds");
  const uint8_t* data = in.take(template_.data_bytes);
  count_.store(count() + 1, std::memory_order_relaxed);
  try {
    call(template_, data);
    reply.u32(static_cast<uint32_t>(stack_.size()));
    for (const IValue& value : stack_) encode(value, reply);
    encode_changes(reply);
    if (!made_.empty()) {
      storages_.count(static_cast<int64_t>(own_bytes(made_)));
      unbound_.emplace(reply_number, std::move(made_));
    }
    let_go();
    return nullptr;
  } catch (...) {
    FailurePtr failure = failure_at_hand(template_.name, count());
    restore_written();
    let_go();
    return failure;
  }
}

// What an op says itself that it will take, before it does.
void OpRunner::check_announced(const Template& template_) const {
  auto sizes = stack_[static_cast<size_t>(template_.size_argument)].toIntVector();
  storages_.check_room(announced_bytes(sizes, given_.empty() ? 1 : given_[0].look->item_bytes));
}

void OpRunner::encode(const IValue& value, Writer& reply) {
  auto kind = [&reply](OutputKind kind) { reply.u8(static_cast<uint8_t>(kind)); };
  if (value.isTensor()) {
    encode_tensor(value.toTensor(), reply);
  } else if (value.isList()) {
    auto items = value.toListRef();
    if (items.size() > LIST_ITEMS_MAX) throw Refused("the op gives too many results to be sent");
    kind(OutputKind::List);
    reply.u32(static_cast<uint32_t>(items.size()));
    for (const IValue& item : items) encode(item, reply);
  } else if (value.isNone()) {
    kind(OutputKind::None);
  } else if (value.isInt()) {
    kind(OutputKind::Integer);
    reply.i64(value.toInt());
  } else if (value.isDouble()) {
    kind(OutputKind::Float);
    reply.f64(value.toDouble());
  } else if (value.isBool()) {
    kind(OutputKind::Boolean);
    reply.u8(value.toBool());
  } else if (value.isComplexDouble()) {
    kind(OutputKind::Complex);
    reply.f64(value.toComplexDouble().real());
    reply.f64(value.toComplexDouble().imag());
  } else {
    throw Refused("the result is a " + value.tagKind() + ", which the wire does not carry");
  }
}

void OpRunner::encode_tensor(const at::Tensor& tensor, Writer& reply) {
  if (!tensor.defined()) {
    reply.u8(static_cast<uint8_t>(OutputKind::None));
    return;
  }
  for (size_t i = 0; i < given_.size(); i++) {
    if (!tensor.is_same(given_[i].tensor)) continue;
    reply.u8(static_cast<uint8_t>(OutputKind::Same));
    reply.u32(static_cast<uint32_t>(i));
    return;
  }
  made_.push_back(as_own(tensor));
  const at::Tensor& made = made_.back();
  reply.u8(static_cast<uint8_t>(OutputKind::New));
  reply.u8(static_cast<uint8_t>(made.scalar_type()));
  reply.u8(static_cast<uint8_t>(made.dim()));
  for (int64_t size : made.sizes()) reply.i64(size);
  for (int64_t stride : made.strides()) reply.i64(stride);
}

at::Tensor OpRunner::as_own(const at::Tensor& found) const {
  check_readable(found);
  bool host_number = found.device().is_cpu() && found.dim() == 0;
  bool here = host_number || found.device() == storages_.device();
  bool lazy = found.is_conj() || found.is_neg() || found._is_zerotensor();
  if (here && !lazy && found.storage_offset() == 0 && is_unshared(found)) return found;
  storages_.check_room(static_cast<uint64_t>(found.numel()) * found.itemsize());
  if (found._is_zerotensor()) return at::zeros(found.sizes(), found.options().device(storages_.device()));
  at::Tensor plain = found.resolve_conj().resolve_neg();
  plain = here ? plain : plain.to(storages_.device());
  return is_unshared(plain) && plain.storage_offset() == 0 ? plain : plain.clone();
}

// Tensors that the op has given another shape or size. Counted here, after everything that can fail.
void OpRunner::encode_changes(Writer& reply) {
  std::vector<uint32_t> changed;
  uint64_t more_bytes = own_bytes(made_);
  for (uint32_t i = 0; i < given_.size(); i++) {
    const Given& given = given_[i];
    if (!given.written || !is_changed(given)) continue;
    if (!given.tensor.storage().is_alias_of(given.slot->storage)) {
      throw Refused("it gives a tensor the memory of another one");
    }
    check_readable(given.tensor);
    changed.push_back(i);
    uint64_t now = given.slot->storage.nbytes();
    more_bytes += now > given.slot->bytes ? now - given.slot->bytes : 0;
  }
  storages_.check_room(more_bytes);
  reply.u32(static_cast<uint32_t>(changed.size()));
  for (uint32_t i : changed) {
    const at::Tensor& tensor = given_[i].tensor;
    reply.u32(i);
    reply.u64(tensor.storage().nbytes());
    reply.u8(static_cast<uint8_t>(tensor.dim()));
    reply.i64(tensor.storage_offset());
    for (int64_t size : tensor.sizes()) reply.i64(size);
    for (int64_t stride : tensor.strides()) reply.i64(stride);
    storages_.recount(*given_[i].slot);
  }
}

void OpRunner::bind(uint64_t reply_number, uint32_t count, Reader& in) {
  const uint8_t* numbers = in.take(sizeof(uint32_t) * count);
  auto found = unbound_.find(reply_number);
  if (found == unbound_.end() ? count != 0 : count != found->second.size()) {
    throw ProtocolError("reply " + std::to_string(reply_number) + " has not given " + std::to_string(count) +
                        " tensors that could be bound");
  }
  if (found == unbound_.end()) return;
  storages_.count(-static_cast<int64_t>(own_bytes(found->second)));
  for (uint32_t i = 0; i < count; i++) storages_.keep(storage_at(numbers, i), std::move(found->second[i]));
  unbound_.erase(found);
}

}  // namespace genie
