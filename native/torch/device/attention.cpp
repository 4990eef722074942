// Ops that torch maps to fused kernels of some accelerators: attention, LSTM and GRU cells. Here they become
// the kernel that the executor's accelerator has, or unfused ops.
#include <cmath>
#include <optional>
#include <tuple>

#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "device_registry.h"
#include "dispatch.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;

bool is_on_cuda_executor(const Tensor& tensor) {
  return device_registry().get_or_open_connection(tensor.device().index())->executor_uses_cuda();
}

// --- attention ----------------------------------------------------------------------------------

// A tensor of a functional transform has no memory of its own, and a choice depends only on the metadata.
Tensor tensor_with_metadata(const Tensor& tensor) {
  if (has_storage_handle(tensor)) return tensor;
  c10::impl::ExcludeDispatchKeyGuard below_transforms(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
}

// The backend that torch selects on the executor: it depends on the GPU, its libraries and the settings, so
// the executor computes it, once per combination of shapes.
at::SDPBackend choose_executor_sdp_backend(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const std::optional<Tensor>& mask, double dropout, bool causal,
                                           std::optional<double> scale, bool enable_gqa) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_fused_sdp_choice", "");
  auto sent_mask = mask ? c10::IValue(tensor_with_metadata(*mask)) : c10::IValue();
  torch::jit::Stack stack{tensor_with_metadata(query),
                          tensor_with_metadata(key),
                          tensor_with_metadata(value),
                          sent_mask,
                          dropout,
                          causal,
                          scale,
                          enable_gqa};
  send_op(op, {}, &stack);
  return static_cast<at::SDPBackend>(stack.back().toInt());
}

// Whether the tensor is of torch's tracing: such tensors have no executor.
bool is_fake(const Tensor& tensor) {
  return tensor.key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

int64_t choose_sdp_backend(const Tensor& query, const Tensor& key, const Tensor& value,
                           const std::optional<Tensor>& mask, double dropout, bool causal,
                           std::optional<double> scale, bool enable_gqa) {
  // The math backend works on all executors.
  if (is_fake(query) || is_fake(key) || is_fake(value) || (mask && is_fake(*mask)))
    return static_cast<int64_t>(at::SDPBackend::math);
  auto chosen = choose_executor_sdp_backend(query, key, value, mask, dropout, causal, scale, enable_gqa);
  // The executor does not see which tensors require gradients; these backends have none for the mask.
  if (mask && mask->requires_grad() && !is_on_cuda_executor(query)) chosen = at::SDPBackend::math;
  if (mask && mask->requires_grad() && chosen == at::SDPBackend::cudnn_attention)
    chosen = enable_gqa ? at::SDPBackend::math : at::SDPBackend::efficient_attention;
  // torch calls the kernel of the CPU for flash attention on a device that it does not know.
  if (chosen == at::SDPBackend::flash_attention && is_on_cuda_executor(query))
    chosen = at::SDPBackend::overrideable;
  return static_cast<int64_t>(chosen);
}

using AttentionResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

// GPU kernels take heads of a multiple of this size.
constexpr int64_t FLASH_HEAD_SIZE_MULTIPLE = 8;

Tensor pad_head(const Tensor& tensor) {
  int64_t excess = tensor.size(-1) % FLASH_HEAD_SIZE_MULTIPLE;
  return excess ? at::constant_pad_nd(tensor, {0, FLASH_HEAD_SIZE_MULTIPLE - excess}, 0) : tensor;
}

// Flash attention on a GPU, as torch calls it there. Registered above autograd, which differentiates the ops
// that it consists of.
AttentionResult compute_flash_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const std::optional<Tensor>&, double dropout, bool causal, bool,
                                        std::optional<double> scale) {
  double used_scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
  auto result = at::_ops::_scaled_dot_product_flash_attention::call(
      pad_head(query), pad_head(key), pad_head(value), dropout, causal, false, used_scale);
  Tensor& output = std::get<0>(result);
  if (output.sym_size(-1) != query.sym_size(-1)) output = output.slice(-1, 0, query.size(-1));
  return result;
}

// torch expects the seed and its offset in host memory.
void send_efficient_attention(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                              torch::jit::Stack* stack) {
  send_op(op, keys, stack);
  for (size_t from_end : {4, 3}) {
    c10::IValue& number = stack->at(stack->size() - from_end);
    number = number.toTensor().cpu();
  }
}

// --- cells --------------------------------------------------------------------------------------

Tensor add_optional_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// Registered above autograd, so autograd differentiates the ops that they consist of.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cell, const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  Tensor gates = add_optional_bias(input_gates, input_bias) + add_optional_bias(hidden_gates, hidden_bias);
  auto parts = gates.chunk(4, 1);
  Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hidden, const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  auto inputs = add_optional_bias(input_gates, input_bias).chunk(3, 1);
  auto hiddens = add_optional_bias(hidden_gates, hidden_bias).chunk(3, 1);
  Tensor reset = (inputs[0] + hiddens[0]).sigmoid();
  Tensor update = (inputs[1] + hiddens[1]).sigmoid();
  Tensor fresh = (inputs[2] + reset * hiddens[2]).tanh();
  return {(hidden - fresh) * update + fresh, reset};
}

}  // namespace

}  // namespace genie

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &::genie::choose_sdp_backend)
}  // namespace at::native

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", genie::compute_flash_attention);
  m.impl("_efficient_attention_forward",
         torch::CppFunction::makeFromBoxedFunction<&genie::send_efficient_attention>());
  m.impl("_thnn_fused_lstm_cell", genie::lstm_cell);
  m.impl("_thnn_fused_gru_cell", genie::gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", genie::compute_flash_attention);
  m.impl("_thnn_fused_lstm_cell", genie::lstm_cell);
  m.impl("_thnn_fused_gru_cell", genie::gru_cell);
}
