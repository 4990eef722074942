// See prediction.h.
#include "prediction.h"

#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "storage.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;

// The remote tensors of a call and what stands for them on the meta device. A list may hold thousands, so
// nothing here looks at all of them for each of them.
struct MetaTwins {
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;
  std::unordered_map<const c10::TensorImpl*, size_t> places;  // of the real ones in `tensors`
  std::vector<std::pair<Tensor, Tensor>> tensors;

  Tensor of(const Tensor& real) {
    auto [place, added] = places.emplace(real.unsafeGetTensorImpl(), tensors.size());
    if (!added) return tensors[place->second].second;
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

// Which input a tensor that the op has given on the meta device goes back to.
class Origins {
 public:
  struct Origin {
    int input;  // the first that is this tensor, or -1
    int64_t offset;
  };

  Origins(const MetaTwins& twins, const std::vector<const Tensor*>& inputs) {
    std::unordered_map<const c10::TensorImpl*, int> places;
    for (size_t i = 0; i < inputs.size(); i++)
      places.emplace(inputs[i]->unsafeGetTensorImpl(), static_cast<int>(i));
    for (const auto& [real, twin] : twins.tensors) {
      auto place = places.find(real.unsafeGetTensorImpl());
      Origin origin{place == places.end() ? -1 : place->second, twin.storage_offset()};
      tensors_.emplace(twin.unsafeGetTensorImpl(), origin);
      memory_.emplace(twin.storage().unsafeGetStorageImpl(), origin);
    }
  }

  // The input that it is, if it is one.
  const Origin* of(const Tensor& made) const { return found(tensors_, made.unsafeGetTensorImpl()); }
  // The first input whose memory it shares, if there is one.
  const Origin* of_memory(const Tensor& made) const {
    return found(memory_, made.storage().unsafeGetStorageImpl());
  }

 private:
  template <class Known>
  static const Origin* found(const Known& origins, typename Known::key_type key) {
    auto origin = origins.find(key);
    if (origin == origins.end()) return nullptr;
    if (origin->second.input < 0) throw NotKnownHere();
    return &origin->second;
  }

  std::unordered_map<const c10::TensorImpl*, Origin> tensors_;
  std::unordered_map<const c10::StorageImpl*, Origin> memory_;
};

Output tensor_from_meta(const Tensor& made, const Origins& origins) {
  Output output;
  if (!made.defined()) return output;
  if (!made.is_meta() || made.layout() != at::kStrided || !is_carried(made.scalar_type()))
    throw NotKnownHere();
  if (const auto* same = origins.of(made)) {
    output.kind = OutputKind::Same;
    output.source = same->input;
    return output;
  }
  output.kind = OutputKind::New;
  output.dtype = made.scalar_type();
  output.sizes.assign(made.sizes().begin(), made.sizes().end());
  output.strides.assign(made.strides().begin(), made.strides().end());
  output.contiguous = made.is_contiguous();
  if (const auto* shared = origins.of_memory(made)) {
    output.view = true;
    output.source = shared->input;
    output.offset = made.storage_offset() - shared->offset;
    return output;
  }
  if (made.storage_offset() || made.is_conj() || made.is_neg()) throw NotKnownHere();
  output.storage_bytes =
      static_cast<int64_t>(at::detail::computeStorageNbytes(made.sizes(), made.strides(), made.itemsize()));
  return output;
}

Output output_from_meta(const IValue& value, const Origins& origins) {
  if (value.isTensor()) return tensor_from_meta(value.toTensor(), origins);
  Output output;
  if (value.isList()) {
    output.kind = OutputKind::List;
    for (const IValue& item : value.toListRef()) output.items.push_back(output_from_meta(item, origins));
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

bool any_mask(const IValue& indices) {
  for (const IValue& index : indices.toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    at::ScalarType dtype = index.toTensor().scalar_type();
    if (dtype == at::kBool || dtype == at::kByte) return true;
  }
  return false;
}

}  // namespace

Worked work_out(const c10::OperatorHandle& op, const OpFacts& facts, const Stack& stack, size_t base,
                const std::vector<const Tensor*>& inputs) {
  Worked worked;
  bool by_values = facts.depends_on_values || (facts.masks_decide && any_mask(stack[base + 1]));
  worked.way = by_values ? Way::Ask : Way::Learn;
  if (by_values || !facts.meta_is_trusted) return worked;
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
    Origins origins(twins, inputs);
    for (size_t i = 0; i < facts.returns; i++) {
      worked.outputs.push_back(output_from_meta(meta[meta.size() - facts.returns + i], origins));
    }
    worked.way = way_of(facts, worked.outputs);
  } catch (const NotKnownHere&) {
    worked.outputs.clear();
  }
  return worked;
}

}  // namespace genie
