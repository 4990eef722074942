// Ops that torch maps to fused kernels of some accelerators: attention, LSTM and GRU cells. Here they become
// the kernel that the executor's accelerator has, or unfused ops.
#include <array>
#include <optional>
#include <tuple>

#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <torch/library.h>

#include "dispatch.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;

bool is_on_cuda_executor(const Tensor& tensor) {
  return storage_handle_of(tensor).connection->executor_uses_cuda();
}

// --- attention ----------------------------------------------------------------------------------

// The backend that torch selects on the executor. It depends on the GPU and its libraries, so the executor
// computes it, once per combination of shapes.
at::SDPBackend choose_executor_sdp_backend(const Tensor& query, const Tensor& key, const Tensor& value,
                                           double dropout, bool causal, std::optional<double> scale) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_fused_sdp_choice", "");
  torch::jit::Stack stack{query, key, value, c10::IValue(), dropout, causal, scale, false};
  send_op(op, {}, &stack);
  return static_cast<at::SDPBackend>(stack.back().toInt());
}

int64_t choose_sdp_backend(const Tensor& query, const Tensor& key, const Tensor& value,
                           const std::optional<Tensor>& mask, double dropout, bool causal,
                           std::optional<double> scale, bool enable_gqa) {
  // A fake tensor has no executor; the math backend works on all of them.
  if (!has_storage_handle(query)) return static_cast<int64_t>(at::SDPBackend::math);
  bool cuda = is_on_cuda_executor(query);
  bool use_math = query.dim() != 4 || enable_gqa || query.size(-1) != value.size(-1) || query.numel() == 0 ||
                  key.numel() == 0;
  if (mask) use_math |= cuda || mask->requires_grad();
  if (!cuda) use_math |= dropout > 0;
  if (!use_math && cuda) {
    use_math = choose_executor_sdp_backend(query.detach(), key.detach(), value.detach(), dropout, causal,
                                           scale) == at::SDPBackend::math;
  }
  return static_cast<int64_t>(use_math ? at::SDPBackend::math : at::SDPBackend::overrideable);
}

using AttentionResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

AttentionResult compute_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& bias, double dropout, bool causal, bool,
                                  std::optional<double> scale) {
  if (!is_on_cuda_executor(query)) {
    auto [output, sums] =
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale);
    return {output, sums, Tensor(), Tensor(), query.size(2), key.size(2), Tensor(), Tensor(), Tensor()};
  }
  switch (choose_executor_sdp_backend(query, key, value, dropout, causal, scale)) {
    case at::SDPBackend::flash_attention:
      return at::_ops::_scaled_dot_product_flash_attention::call(query, key, value, dropout, causal, false,
                                                                 scale);
    case at::SDPBackend::cudnn_attention:
      return at::_ops::_scaled_dot_product_cudnn_attention::call(query, key, value, bias, true, dropout,
                                                                 causal, false, scale);
    default:
      auto [output, sums, seed, offset] =
          at::_scaled_dot_product_efficient_attention(query, key, value, bias, true, dropout, causal, scale);
      return {output, sums, Tensor(), Tensor(), query.size(2), key.size(2), seed, offset, Tensor()};
  }
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

using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

AttentionGradients attention_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                      const Tensor& value, const Tensor& bias, std::array<bool, 4>,
                                      const Tensor& output, const Tensor& logsumexp,
                                      const Tensor& query_cumulative_lengths,
                                      const Tensor& key_cumulative_lengths, c10::SymInt query_length_max,
                                      c10::SymInt key_length_max, double dropout, bool causal,
                                      const Tensor& seed, const Tensor& offset, std::optional<double> scale) {
  if (!is_on_cuda_executor(query)) {
    auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
    auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logsumexp, dropout, causal, mask, scale);
    return {q, k, v, Tensor()};
  }
  switch (choose_executor_sdp_backend(query, key, value, dropout, causal, scale)) {
    case at::SDPBackend::flash_attention: {
      auto [q, k, v] = at::_ops::_scaled_dot_product_flash_attention_backward::call(
          gradient, query, key, value, output, logsumexp, query_cumulative_lengths, key_cumulative_lengths,
          query_length_max, key_length_max, dropout, causal, seed, offset, scale);
      return {q, k, v, Tensor()};
    }
    case at::SDPBackend::cudnn_attention: {
      auto [q, k, v] = at::_ops::_scaled_dot_product_cudnn_attention_backward::call(
          gradient, query, key, value, output, logsumexp, seed, offset, bias, query_cumulative_lengths,
          key_cumulative_lengths, query_length_max, key_length_max, dropout, causal, scale);
      return {q, k, v, Tensor()};
    }
    default:
      return at::_scaled_dot_product_efficient_attention_backward(gradient, query, key, value, bias, output,
                                                                  logsumexp, seed, offset, dropout,
                                                                  {true, true, true, false}, causal, scale);
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
  m.impl("_scaled_dot_product_fused_attention_overrideable", genie::compute_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", genie::attention_backward);
  m.impl("_efficient_attention_forward",
         torch::CppFunction::makeFromBoxedFunction<&genie::send_efficient_attention>());
  m.impl("_thnn_fused_lstm_cell", genie::lstm_cell);
  m.impl("_thnn_fused_gru_cell", genie::gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", genie::lstm_cell);
  m.impl("_thnn_fused_gru_cell", genie::gru_cell);
}
