// LSTM, GRU and RNN: sent as the fused ops that torch uses on the executor's accelerator (cuDNN on NVIDIA
// GPUs, oneDNN on CPUs), or whole, or composed of smaller ops (recurrent_steps.h). Not here: single cells
// (attention.cpp).
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_cudnn_init_dropout_state.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "device_type.h"
#include "dispatch.h"
#include "recurrent.h"
#include "recurrent_steps.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;
using at::TensorList;
using OneState = std::tuple<Tensor, Tensor>;           // output, final hidden state
using TwoStates = std::tuple<Tensor, Tensor, Tensor>;  // output, final hidden state, final cell state

bool is_on_executor(const Tensor& tensor) { return tensor.defined() && has_storage_handle(tensor); }

bool is_on_cuda_executor(const Tensor& tensor) {
  return storage_handle_of(tensor).connection->executor_uses_cuda();
}

// Fake tensors and mixed devices are left to torch, which decomposes the op or raises.
bool are_all_on_executor(const Tensor& input, TensorList states, TensorList weights) {
  if (!is_on_executor(input)) return false;
  for (TensorList tensors : {states, weights})
    for (const Tensor& each : tensors)
      if (!is_on_executor(each) || each.device() != input.device()) return false;
  return true;
}

// --- cuDNN --------------------------------------------------------------------------------------

// Asks the executor, once per combination of dtype and shape.
bool uses_cudnn(const Tensor& input) {
  if (!is_on_cuda_executor(input) || !at::globalContext().userEnabledCuDNN()) return false;
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::cudnn_is_acceptable", "");
  torch::jit::Stack stack{input.detach()};
  send_op(op, {}, &stack);
  return stack.back().toBool();
}

// The states of cuDNN's dropout: one per device and process, seeded from the generator of the device, as
// torch does for GPUs.
class CudnnDropoutStates {
 public:
  Tensor get_or_create(const Tensor& input, double dropout, bool train) {
    if (!train || dropout <= 0) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    Tensor& state = by_device_index_[input.device().index()];
    bool is_usable =
        state.defined() && storage_handle_of(state).connection == storage_handle_of(input).connection;
    if (take_reseeded(input.device().index()) || !is_usable) {
      auto seed = at::empty({}, input.options().dtype(at::kLong)).random_().item<int64_t>();
      state = at::_cudnn_init_dropout_state(dropout, train, seed, input.options().dtype(at::kByte));
    }
    return state;
  }

  void reset(int device_index) {
    std::lock_guard<std::mutex> lock(reseeded_mutex_);
    reseeded_.insert(device_index);
  }

 private:
  bool take_reseeded(int device_index) {
    std::lock_guard<std::mutex> lock(reseeded_mutex_);
    return reseeded_.erase(device_index) > 0;
  }

  std::mutex mutex_;
  std::unordered_map<int, Tensor> by_device_index_;
  std::mutex reseeded_mutex_;  // never held while an op is sent
  std::unordered_set<int> reseeded_;
};

CudnnDropoutStates& cudnn_dropout_states() {
  static auto* states = new CudnnDropoutStates();  // never destroyed: tensors need the session
  return *states;
}

// `batch_sizes` is empty unless the input is packed. `cell` is undefined unless it is an LSTM.
TwoStates run_cudnn(const Tensor& input, at::IntArrayRef batch_sizes, const Tensor& hidden,
                    const Tensor& cell, const RecurrentLayers& layers) {
  bool has_projection = cell.defined() && cell.size(2) != hidden.size(2);
  int64_t hidden_size = has_projection ? cell.size(2) : hidden.size(2);
  int64_t projection_size = has_projection ? hidden.size(2) : 0;
  int64_t weights_per_layer = (layers.has_biases ? 4 : 2) + (has_projection ? 1 : 0);
  Tensor dropout_state = cudnn_dropout_states().get_or_create(input, layers.dropout, layers.train);
  auto outputs = at::_cudnn_rnn(input, layers.weights, weights_per_layer, /*weight_buf=*/std::nullopt, hidden,
                                cell, static_cast<int64_t>(layers.mode), hidden_size, projection_size,
                                layers.layer_count, layers.batch_first, layers.dropout, layers.train,
                                layers.bidirectional, batch_sizes, dropout_state);
  return {std::get<0>(outputs), std::get<1>(outputs), std::get<2>(outputs)};
}

std::vector<int64_t> read_batch_sizes(const Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.dim() == 1, "batch_sizes tensor should be 1D");
  TORCH_CHECK(batch_sizes.device().is_cpu(), "batch_sizes tensor should be on CPU, but got ",
              batch_sizes.device());
  Tensor plain = batch_sizes.to(at::kLong).contiguous();
  const int64_t* values = plain.const_data_ptr<int64_t>();
  return {values, values + plain.numel()};
}

// --- oneDNN -------------------------------------------------------------------------------------

bool uses_onednn(const Tensor& input, const Tensor& hidden, const Tensor& cell) {
  return !is_on_cuda_executor(input) && at::globalContext().userEnabledMkldnn() &&
         input.scalar_type() == at::kFloat && input.numel() != 0 && hidden.size(2) == cell.size(2);
}

// oneDNN has an op for each layer and direction. Executors run it as if gradients were needed; where they are
// not, the LSTM is sent whole.
TwoStates run_onednn_lstm(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                          const RecurrentLayers& layers) {
  const int64_t directions = layers.direction_count();
  const size_t weights_per_layer = layers.has_biases ? 4 : 2;
  Tensor states = hidden.contiguous(), cells = cell.contiguous();
  Tensor between = (layers.batch_first ? input.transpose(0, 1) : input).contiguous();
  std::vector<Tensor> final_states, final_cells;
  for (int64_t layer = 0; layer < layers.layer_count; layer++) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; direction++) {
      int64_t number = layer * directions + direction;
      auto weights = layers.weights.slice(static_cast<size_t>(number) * weights_per_layer, weights_per_layer);
      auto result = at::mkldnn_rnn_layer(
          between, weights[0], weights[1], layers.has_biases ? weights[2] : at::zeros_like(weights[0]),
          layers.has_biases ? weights[3] : at::zeros_like(weights[1]), states[number], cells[number],
          /*reverse=*/direction > 0, /*batch_sizes=*/{}, static_cast<int64_t>(layers.mode), hidden.size(2),
          layers.layer_count, layers.has_biases, layers.bidirectional, layers.batch_first, layers.train);
      outputs.push_back(std::get<0>(result));
      final_states.push_back(std::get<1>(result));
      final_cells.push_back(std::get<2>(result));
    }
    between = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (layers.drops_out() && layer + 1 < layers.layer_count)
      between = at::dropout(between, layers.dropout, /*train=*/true);
  }
  Tensor output = layers.batch_first ? between.transpose(0, 1) : between;
  return {output, at::stack(final_states, 0), at::stack(final_cells, 0)};
}

// --- the whole op ---------------------------------------------------------------------------------

// Whether the executor can run the op alone: no gradients, random numbers or casts are needed within it. On a
// transposed input, torch multiplies in another way if the weights require gradients, which those of an
// executor never do; oneDNN does not.
bool can_be_sent_whole(const Tensor& input, const RecurrentLayers& layers, bool is_run_by_onednn) {
  if (is_on_cuda_executor(input) || at::GradMode::is_enabled() || layers.drops_out() ||
      at::autocast::is_autocast_enabled(DEVICE_TYPE) || !at::globalContext().userEnabledMkldnn())
    return false;
  bool is_transposed_with_gradients = false;
  for (const Tensor& weight : layers.weights)
    is_transposed_with_gradients |= layers.batch_first && weight.requires_grad();
  return is_run_by_onednn || !is_transposed_with_gradients;
}

torch::jit::Stack send_whole(const char* name, const Tensor& input, c10::IValue states,
                             const RecurrentLayers& layers) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "input");
  torch::jit::Stack stack{
      input,          std::move(states), layers.weights,       layers.has_biases, layers.layer_count,
      layers.dropout, layers.train,      layers.bidirectional, layers.batch_first};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  send_op(op, {}, &stack);
  return stack;
}

// --- kernels ------------------------------------------------------------------------------------

TwoStates lstm(const Tensor& input, TensorList states, TensorList weights, bool has_biases,
               int64_t layer_count, double dropout, bool train, bool bidirectional, bool batch_first) {
  TORCH_CHECK(states.size() == 2, "lstm expects two hidden states");
  RecurrentLayers layers{RecurrentMode::Lstm, weights,    has_biases, layer_count, dropout, train,
                         bidirectional,       batch_first};
  if (are_all_on_executor(input, states, weights)) {
    if (uses_cudnn(input)) return run_cudnn(input, {}, states[0], states[1], layers);
    bool has_onednn = uses_onednn(input, states[0], states[1]);
    if (can_be_sent_whole(input, layers, has_onednn)) {
      auto results = send_whole("aten::lstm", input, states, layers);
      return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
    }
    if (has_onednn) return run_onednn_lstm(input, states[0], states[1], layers);
    if (!is_on_cuda_executor(input)) {
      auto result = run_recurrent_steps(input, states[0], states[1], layers);
      return {result.output, result.hidden, result.cell};
    }
  }
  return at::native::lstm(input, states, weights, has_biases, layer_count, dropout, train, bidirectional,
                          batch_first);
}

TwoStates packed_lstm(const Tensor& data, const Tensor& batch_sizes, TensorList states, TensorList weights,
                      bool has_biases, int64_t layer_count, double dropout, bool train, bool bidirectional) {
  TORCH_CHECK(states.size() == 2, "lstm expects two hidden states");
  RecurrentLayers layers{RecurrentMode::Lstm,  weights, has_biases, layer_count, dropout, train,
                         bidirectional,
                         /*batch_first=*/false};
  if (are_all_on_executor(data, states, weights) && uses_cudnn(data))
    return run_cudnn(data, read_batch_sizes(batch_sizes), states[0], states[1], layers);
  return at::native::lstm(data, batch_sizes, states, weights, has_biases, layer_count, dropout, train,
                          bidirectional);
}

using ComposedRecurrent = OneState (*)(const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool,
                                       bool, bool);
using ComposedPackedRecurrent = OneState (*)(const Tensor&, const Tensor&, const Tensor&, TensorList, bool,
                                             int64_t, double, bool, bool);

constexpr const char* op_name(RecurrentMode mode) {
  return mode == RecurrentMode::Gru    ? "aten::gru"
         : mode == RecurrentMode::Tanh ? "aten::rnn_tanh"
                                       : "aten::rnn_relu";
}

template <RecurrentMode mode, ComposedRecurrent compose>
OneState recurrent(const Tensor& input, const Tensor& hidden, TensorList weights, bool has_biases,
                   int64_t layer_count, double dropout, bool train, bool bidirectional, bool batch_first) {
  RecurrentLayers layers{mode, weights, has_biases, layer_count, dropout, train, bidirectional, batch_first};
  if (are_all_on_executor(input, hidden, weights)) {
    if (uses_cudnn(input)) {
      auto results = run_cudnn(input, {}, hidden, {}, layers);
      return {std::get<0>(results), std::get<1>(results)};
    }
    if (can_be_sent_whole(input, layers, /*is_run_by_onednn=*/false)) {
      auto results = send_whole(op_name(mode), input, hidden, layers);
      return {results[0].toTensor(), results[1].toTensor()};
    }
    if (!is_on_cuda_executor(input)) {
      auto result = run_recurrent_steps(input, hidden, {}, layers);
      return {result.output, result.hidden};
    }
  }
  return compose(input, hidden, weights, has_biases, layer_count, dropout, train, bidirectional, batch_first);
}

template <RecurrentMode mode, ComposedPackedRecurrent compose>
OneState packed_recurrent(const Tensor& data, const Tensor& batch_sizes, const Tensor& hidden,
                          TensorList weights, bool has_biases, int64_t layer_count, double dropout,
                          bool train, bool bidirectional) {
  RecurrentLayers layers{mode, weights, has_biases, layer_count, dropout, train, bidirectional, false};
  if (are_all_on_executor(data, hidden, weights) && uses_cudnn(data)) {
    auto results = run_cudnn(data, read_batch_sizes(batch_sizes), hidden, {}, layers);
    return {std::get<0>(results), std::get<1>(results)};
  }
  return compose(data, batch_sizes, hidden, weights, has_biases, layer_count, dropout, train, bidirectional);
}

void register_recurrent_ops(torch::Library& library) {
  using enum RecurrentMode;
  library.impl("lstm.input", TORCH_FN(lstm));
  library.impl("lstm.data", TORCH_FN(packed_lstm));
  library.impl("gru.input", TORCH_FN((recurrent<Gru, &at::native::gru>)));
  library.impl("gru.data", TORCH_FN((packed_recurrent<Gru, &at::native::gru>)));
  library.impl("rnn_tanh.input", TORCH_FN((recurrent<Tanh, &at::native::rnn_tanh>)));
  library.impl("rnn_tanh.data", TORCH_FN((packed_recurrent<Tanh, &at::native::rnn_tanh>)));
  library.impl("rnn_relu.input", TORCH_FN((recurrent<Relu, &at::native::rnn_relu>)));
  library.impl("rnn_relu.data", TORCH_FN((packed_recurrent<Relu, &at::native::rnn_relu>)));
}

}  // namespace

void reset_cudnn_dropout(int device_index) { cudnn_dropout_states().reset(device_index); }

}  // namespace genie

// With and without gradients: the ops above compute gradients through the ops that they call.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { genie::register_recurrent_ops(m); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { genie::register_recurrent_ops(m); }
