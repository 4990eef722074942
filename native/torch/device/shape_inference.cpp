// See shape_inference.h.
#include "shape_inference.h"

#include <algorithm>
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
  std::unordered_map<const c10::StorageImpl*, c10::Storage> meta_storage_by_remote_storage;
  std::unordered_map<const c10::TensorImpl*, size_t>
      index_by_remote_tensor;  // of the real tensors in `remote_and_meta_tensors`
  std::vector<std::pair<Tensor, Tensor>> remote_and_meta_tensors;

  Tensor make_meta_tensor(const Tensor& remote_tensor) {
    auto [place, added] =
        index_by_remote_tensor.emplace(remote_tensor.unsafeGetTensorImpl(), remote_and_meta_tensors.size());
    if (!added) return remote_and_meta_tensors[place->second].second;
    const auto* storage = remote_tensor.storage().unsafeGetStorageImpl();
    auto found = meta_storage_by_remote_storage.find(storage);
    if (found == meta_storage_by_remote_storage.end()) {
      auto bytes = static_cast<int64_t>(remote_tensor.storage().nbytes());
      Tensor whole = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kMeta));
      found = meta_storage_by_remote_storage.emplace(storage, whole.storage()).first;
    }
    Tensor meta = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::Meta), remote_tensor.dtype());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(remote_tensor.sizes(), remote_tensor.strides(),
                                                      remote_tensor.storage_offset());
    if (remote_tensor.is_conj()) meta._set_conj(true);
    if (remote_tensor.is_neg()) meta._set_neg(true);
    remote_and_meta_tensors.emplace_back(remote_tensor, meta);
    return meta;
  }

  IValue to_meta_value(const IValue& value) {
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      return tensor.defined() && tensor.device().type() == DEVICE_TYPE ? IValue(make_meta_tensor(tensor))
                                                                       : value;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::Meta);
    if (value.isGenerator()) return IValue();
    if (value.isList()) {
      auto items = value.toList();
      c10::impl::GenericList metas(items.elementType());
      for (size_t i = 0; i < items.size(); i++) metas.push_back(to_meta_value(items.get(i)));
      return metas;
    }
    return value;
  }
};

// The outputs cannot be described here; the executor has to.
struct InferenceFailed : std::exception {};

// Finds the input that an output on the meta device is, or is a view of.
class MetaOutputOrigins {
 public:
  struct InputOrigin {
    int input_index;  // the first input that is this tensor, or -1
    int64_t storage_offset;
  };

  MetaOutputOrigins(const MetaTensors& metas, const std::vector<const Tensor*>& inputs) {
    std::unordered_map<const c10::TensorImpl*, int> positions;
    for (size_t i = 0; i < inputs.size(); i++)
      positions.emplace(inputs[i]->unsafeGetTensorImpl(), static_cast<int>(i));
    for (const auto& [real, meta] : metas.remote_and_meta_tensors) {
      auto place = positions.find(real.unsafeGetTensorImpl());
      InputOrigin origin{place == positions.end() ? -1 : place->second, meta.storage_offset()};
      origin_by_tensor_.emplace(meta.unsafeGetTensorImpl(), origin);
      origin_by_storage_.emplace(meta.storage().unsafeGetStorageImpl(), origin);
    }
  }

  // The input that the tensor is, or null.
  const InputOrigin* find_same_input(const Tensor& meta_output) const {
    return find_origin(origin_by_tensor_, meta_output.unsafeGetTensorImpl());
  }
  // The first input that it shares memory with, or null.
  const InputOrigin* find_shared_memory_input(const Tensor& meta_output) const {
    return find_origin(origin_by_storage_, meta_output.storage().unsafeGetStorageImpl());
  }

 private:
  template <class Known>
  static const InputOrigin* find_origin(const Known& origins, typename Known::key_type key) {
    auto origin = origins.find(key);
    if (origin == origins.end()) return nullptr;
    if (origin->second.input_index < 0) throw InferenceFailed();
    return &origin->second;
  }

  std::unordered_map<const c10::TensorImpl*, InputOrigin> origin_by_tensor_;
  std::unordered_map<const c10::StorageImpl*, InputOrigin> origin_by_storage_;
};

OutputSpec output_spec_from_meta_tensor(const Tensor& meta_output, const MetaOutputOrigins& origins) {
  OutputSpec output;
  if (!meta_output.defined()) return output;
  if (!meta_output.is_meta() || meta_output.layout() != at::kStrided ||
      !is_supported_dtype(meta_output.scalar_type()))
    throw InferenceFailed();
  if (const auto* same = origins.find_same_input(meta_output)) {
    output.kind = OutputKind::Alias;
    output.source_input_index = same->input_index;
    return output;
  }
  output.kind = OutputKind::New;
  output.dtype = meta_output.scalar_type();
  output.sizes.assign(meta_output.sizes().begin(), meta_output.sizes().end());
  output.strides.assign(meta_output.strides().begin(), meta_output.strides().end());
  output.is_contiguous = meta_output.is_contiguous();
  if (const auto* shared = origins.find_shared_memory_input(meta_output)) {
    output.is_view = true;
    output.source_input_index = shared->input_index;
    output.offset = meta_output.storage_offset() - shared->storage_offset;
    return output;
  }
  if (meta_output.storage_offset() || meta_output.is_conj() || meta_output.is_neg()) throw InferenceFailed();
  output.storage_bytes = static_cast<int64_t>(
      at::detail::computeStorageNbytes(meta_output.sizes(), meta_output.strides(), meta_output.itemsize()));
  return output;
}

OutputSpec output_spec_from_meta_value(const IValue& value, const MetaOutputOrigins& origins) {
  if (value.isTensor()) return output_spec_from_meta_tensor(value.toTensor(), origins);
  OutputSpec output;
  if (value.isList()) {
    output.kind = OutputKind::List;
    for (const IValue& item : value.toListRef())
      output.items.push_back(output_spec_from_meta_value(item, origins));
    output.constant = c10::impl::GenericList(value.toList().elementType());
  } else if (value.isNone()) {
    output.constant = value;
  } else if (value.isInt() || value.isSymInt()) {
    output.kind = OutputKind::Integer;
    output.constant = value.isInt() ? value : IValue(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else {
    throw InferenceFailed();
  }
  return output;
}

// Applies resizes of arguments (`out=`) before the op is sent. Returns whether there was one.
bool apply_resizes_and_check_any_resized(const MetaTensors& metas) {
  bool any = false;
  for (const auto& [real, meta] : metas.remote_and_meta_tensors) {
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

bool has_only_views(const OutputSpec& output) {
  if (output.kind != OutputKind::List) return output.is_view || output.kind == OutputKind::Alias;
  for (const OutputSpec& item : output.items)
    if (!has_only_views(item)) return false;
  return true;
}

bool has_view(const OutputSpec& output) {
  for (const OutputSpec& item : output.items)
    if (has_view(item)) return true;
  return output.is_view;
}

OpExecutionMode choose_execution_mode(const OpTraits& traits, const std::vector<OutputSpec>& outputs) {
  bool all_local = !traits.writes_arguments && !outputs.empty(), views = false;
  for (const OutputSpec& output : outputs) {
    all_local &= has_only_views(output);
    views |= has_view(output);
  }
  if (all_local) return OpExecutionMode::ClientOnly;
  return views ? OpExecutionMode::AwaitReply : OpExecutionMode::Streamed;
}

bool has_elements_in_default_order(const Tensor& tensor) {
  if (tensor.numel() == 0) return false;
  int64_t expected = 1;
  auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

bool creates_tensor(const OutputSpec& output) {
  if (output.kind == OutputKind::New && !output.is_view) return true;
  return std::any_of(output.items.begin(), output.items.end(), creates_tensor);
}

// Whether the outputs may have other strides than those of the meta function: a kernel chooses their memory
// format by its inputs, the accelerator and its libraries.
bool may_differ_in_strides(const OpTraits& traits, const std::vector<OutputSpec>& outputs,
                           const std::vector<const Tensor*>& inputs) {
  if (traits.shares_meta_function_with_kernels) return false;
  return std::any_of(outputs.begin(), outputs.end(), creates_tensor) &&
         !std::all_of(inputs.begin(), inputs.end(),
                      [](const Tensor* input) { return has_elements_in_default_order(*input); });
}

bool has_mask_index(const IValue& indices) {
  for (const IValue& index : indices.toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    at::ScalarType dtype = index.toTensor().scalar_type();
    if (dtype == at::kBool || dtype == at::kByte) return true;
  }
  return false;
}

}  // namespace

InferredOutputs infer_outputs(const c10::OperatorHandle& op, const OpTraits& traits, const Stack& stack,
                              size_t first_argument, const std::vector<const Tensor*>& inputs) {
  InferredOutputs inference;
  bool by_values = traits.outputs_depend_on_values ||
                   (traits.outputs_depend_on_masks && has_mask_index(stack[first_argument + 1]));
  inference.mode = by_values ? OpExecutionMode::AwaitReply : OpExecutionMode::LearnFromReply;
  if (by_values || !traits.has_reliable_meta_kernel) return inference;
  MetaTensors metas;
  Stack meta;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < traits.argument_count; i++)
      meta.push_back(metas.to_meta_value(stack[first_argument + i]));
    op.callBoxed(&meta);
  } catch (const std::exception&) {
    return inference;  // the executor reports the error, or supports what the meta device does not
  }
  if (apply_resizes_and_check_any_resized(metas)) {
    inference.has_resized_arguments = true;
    return inference;
  }
  try {
    MetaOutputOrigins origins(metas, inputs);
    for (size_t i = 0; i < traits.return_count; i++) {
      inference.outputs.push_back(
          output_spec_from_meta_value(meta[meta.size() - traits.return_count + i], origins));
    }
    inference.mode = choose_execution_mode(traits, inference.outputs);
    if (inference.mode == OpExecutionMode::Streamed &&
        may_differ_in_strides(traits, inference.outputs, inputs)) {
      inference.outputs.clear();
      inference.mode = OpExecutionMode::LearnFromReply;
    }
  } catch (const InferenceFailed&) {
    inference.outputs.clear();
  }
  return inference;
}

}  // namespace genie
