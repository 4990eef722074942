// See shape_inference.h.
#include "shape_inference.h"

#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "device_type.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// The remote tensors of a call, with their meta counterparts. A list may hold thousands, so lookups are
// hashed.
struct MetaTensors {
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;
  std::unordered_map<const c10::TensorImpl*, size_t> places;  // of the real tensors in `tensors`
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
    Tensor meta = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::Meta), real.dtype());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(real.sizes(), real.strides(), real.storage_offset());
    if (real.is_conj()) meta._set_conj(true);
    if (real.is_neg()) meta._set_neg(true);
    tensors.emplace_back(real, meta);
    return meta;
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
      c10::impl::GenericList metas(items.elementType());
      for (size_t i = 0; i < items.size(); i++) metas.push_back(of_value(items.get(i)));
      return metas;
    }
    return value;
  }
};

// The outputs cannot be described here; the executor has to.
struct CannotInfer : std::exception {};

// Finds the input that an output on the meta device is, or is a view of.
class Origins {
 public:
  struct Origin {
    int input;  // the first input that is this tensor, or -1
    int64_t offset;
  };

  Origins(const MetaTensors& metas, const std::vector<const Tensor*>& inputs) {
    std::unordered_map<const c10::TensorImpl*, int> places;
    for (size_t i = 0; i < inputs.size(); i++)
      places.emplace(inputs[i]->unsafeGetTensorImpl(), static_cast<int>(i));
    for (const auto& [real, meta] : metas.tensors) {
      auto place = places.find(real.unsafeGetTensorImpl());
      Origin origin{place == places.end() ? -1 : place->second, meta.storage_offset()};
      tensors_.emplace(meta.unsafeGetTensorImpl(), origin);
      memory_.emplace(meta.storage().unsafeGetStorageImpl(), origin);
    }
  }

  // The input that the tensor is, or null.
  const Origin* of(const Tensor& made) const { return found(tensors_, made.unsafeGetTensorImpl()); }
  // The first input that it shares memory with, or null.
  const Origin* of_memory(const Tensor& made) const {
    return found(memory_, made.storage().unsafeGetStorageImpl());
  }

 private:
  template <class Known>
  static const Origin* found(const Known& origins, typename Known::key_type key) {
    auto origin = origins.find(key);
    if (origin == origins.end()) return nullptr;
    if (origin->second.input < 0) throw CannotInfer();
    return &origin->second;
  }

  std::unordered_map<const c10::TensorImpl*, Origin> tensors_;
  std::unordered_map<const c10::StorageImpl*, Origin> memory_;
};

Output tensor_from_meta(const Tensor& made, const Origins& origins) {
  Output output;
  if (!made.defined()) return output;
  if (!made.is_meta() || made.layout() != at::kStrided || !is_supported_dtype(made.scalar_type()))
    throw CannotInfer();
  if (const auto* same = origins.of(made)) {
    output.kind = OutputKind::Alias;
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
  if (made.storage_offset() || made.is_conj() || made.is_neg()) throw CannotInfer();
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
    throw CannotInfer();
  }
  return output;
}

// Applies resizes of arguments (`out=`) before the op is sent. Returns whether there was one.
bool apply_resizes(const MetaTensors& metas) {
  bool any = false;
  for (const auto& [real, meta] : metas.tensors) {
    if (meta.sizes() == real.sizes() && meta.strides() == real.strides()) continue;
    auto* impl = real.unsafeGetTensorImpl();
    auto bytes = at::detail::computeStorageNbytes(meta.sizes(), meta.strides(), meta.itemsize(),
                                                  real.storage_offset());
    if (bytes > real.storage().nbytes()) resize_storage(*real.storage().unsafeGetStorageImpl(), bytes);
    impl->set_sizes_and_strides(meta.sizes(), meta.strides());
    any = true;
  }
  return any;
}

bool only_views(const Output& output) {
  if (output.kind != OutputKind::List) return output.view || output.kind == OutputKind::Alias;
  for (const Output& item : output.items)
    if (!only_views(item)) return false;
  return true;
}

bool any_view(const Output& output) {
  for (const Output& item : output.items)
    if (any_view(item)) return true;
  return output.view;
}

OpExecutionMode mode_for(const OpTraits& traits, const std::vector<Output>& outputs) {
  bool all_local = !traits.writes && !outputs.empty(), views = false;
  for (const Output& output : outputs) {
    all_local &= only_views(output);
    views |= any_view(output);
  }
  if (all_local) return OpExecutionMode::Local;
  return views ? OpExecutionMode::Dynamic : OpExecutionMode::Stream;
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

Inference infer_outputs(const c10::OperatorHandle& op, const OpTraits& traits, const Stack& stack,
                        size_t base, const std::vector<const Tensor*>& inputs) {
  Inference inference;
  bool by_values = traits.depends_on_values || (traits.depends_on_masks && any_mask(stack[base + 1]));
  inference.mode = by_values ? OpExecutionMode::Dynamic : OpExecutionMode::Learn;
  if (by_values || !traits.trusts_meta) return inference;
  MetaTensors metas;
  Stack meta;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < traits.arguments; i++) meta.push_back(metas.of_value(stack[base + i]));
    op.callBoxed(&meta);
  } catch (const std::exception&) {
    return inference;  // the executor reports the error, or supports what the meta device does not
  }
  if (apply_resizes(metas)) {
    inference.resized = true;
    return inference;
  }
  try {
    Origins origins(metas, inputs);
    for (size_t i = 0; i < traits.returns; i++) {
      inference.outputs.push_back(output_from_meta(meta[meta.size() - traits.returns + i], origins));
    }
    inference.mode = mode_for(traits, inference.outputs);
  } catch (const CannotInfer&) {
    inference.outputs.clear();
  }
  return inference;
}

}  // namespace genie
