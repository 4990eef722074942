#include "op_arguments.h"

#include <algorithm>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/clamp.h>
#include <c10/util/Exception.h>

#include "failure.h"
#include "tensor_meta.h"

namespace genie {

size_t OpArguments::position(const char* name) const {
  auto index = schema_.argumentIndexWithName(name);
  if (!index) throw OpRefused(schema_.name() + " has no argument " + name);
  return static_cast<size_t>(*index);
}

const at::Tensor* OpArguments::find_tensor(const char* name) const {
  auto index = schema_.argumentIndexWithName(name);
  if (!index) return nullptr;
  const c10::IValue& found = values_[static_cast<size_t>(*index)];
  return found.isTensor() && found.toTensor().defined() ? &found.toTensor() : nullptr;
}

const at::Tensor& OpArguments::tensor(const char* name) const {
  const at::Tensor* found = find_tensor(name);
  require(found, std::string(name) + " must be a tensor");
  return *found;
}

std::vector<at::Tensor> OpArguments::tensors(const char* name) const {
  auto found = value(name).toTensorVector();
  for (const at::Tensor& tensor : found) require(tensor.defined(), std::string(name) + " contains no tensor");
  return found;
}

std::optional<double> OpArguments::try_float(const char* name) const {
  if (!has_argument(name) || value(name).isNone()) return std::nullopt;
  return value(name).toDouble();
}

std::vector<int64_t> OpArguments::host_integers(const char* name) const {
  const c10::IValue& found = value(name);
  return found.isTensor() ? host_integers(tensor(name)) : found.toIntVector();
}

std::vector<int64_t> OpArguments::host_integers(const at::Tensor& tensor) const {
  require(c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false), "expected a tensor of integers");
  require(!tensor.is_meta(), "not compiled, because its arguments are checked at each call");
  at::Tensor plain = tensor.to(at::TensorOptions().device(c10::kCPU).dtype(at::kLong)).contiguous();
  const auto* numbers = plain.const_data_ptr<int64_t>();
  return {numbers, numbers + plain.numel()};
}

void OpArguments::require(bool is_true, const std::string& message) const {
  if (!is_true) throw OpRefused(schema_.name() + ": " + message);
}

void OpArguments::require_sizes(const char* name, c10::IntArrayRef sizes) const {
  const at::Tensor& found = tensor(name);
  if (found.sizes() == sizes) return;
  throw OpRefused(schema_.name() + ": " + name + " is " +
                  describe_tensor(found.scalar_type(), found.sizes()) + "; its shape must be " +
                  describe_sizes(sizes));
}

void OpArguments::require_count(const char* name, int64_t count) const {
  const at::Tensor& found = tensor(name);
  if (found.numel() == count) return;
  throw OpRefused(schema_.name() + ": " + name + " is " +
                  describe_tensor(found.scalar_type(), found.sizes()) + "; it must have " +
                  std::to_string(count) + " elements");
}

void OpArguments::make_dense(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const at::Tensor* found = find_tensor(name);
    if (found && !found->is_non_overlapping_and_dense()) values_[position(name)] = found->contiguous();
  }
}

void OpArguments::bound_indices(const char* name, int64_t first, int64_t end, CompiledCode compiled) {
  const at::Tensor& indices = tensor(name);
  require(c10::isIntegralType(indices.scalar_type(), /*includeBool=*/false),
          std::string(name) + " must be a tensor of integers");
  if (indices.numel() == 0) return;
  if (indices.is_meta()) {
    require(compiled == CompiledCode::ChecksIndices,
            "not compiled, because its indices are checked at each call");
    return;
  }
  if (indices.is_cpu()) return check_bounds_on_cpu(name, indices, first, end);
  require(first < end, std::string(name) + " refer to an empty tensor");
  auto highest = end - 1;
  if (indices.scalar_type() == at::kInt) highest = std::min<int64_t>(highest, INT32_MAX);
  values_[position(name)] = at::clamp(indices, first, highest);
}

void OpArguments::check_bounds_on_cpu(const char* name, const at::Tensor& indices, int64_t first,
                                      int64_t end) const {
  auto [low, high] = at::aminmax(indices);
  int64_t lowest = low.item().toLong(), highest = high.item().toLong();
  TORCH_CHECK_INDEX(lowest >= first && highest < end, schema_.name(), ": ", name, " contains ",
                    lowest < first ? lowest : highest, ", which is not in the range ", first, " to ",
                    end - 1);
}

}  // namespace genie
