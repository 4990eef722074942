// See recurrent_steps.h.
#include "recurrent_steps.h"

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>

namespace genie {

namespace {

using at::Tensor;

// The weights of one layer and direction.
struct CellWeights {
  Tensor input, hidden, input_bias, hidden_bias, projection;
};

struct CellState {
  Tensor hidden, cell;
};

CellWeights select_weights(const RecurrentLayers& layers, int64_t number, bool has_projection) {
  const size_t count = (layers.has_biases ? 4 : 2) + (has_projection ? 1 : 0);
  const size_t first = static_cast<size_t>(number) * count;
  TORCH_CHECK(first + count <= layers.weights.size(), "got an incorrect number of RNN parameters");
  auto weights = layers.weights.slice(first, count);
  CellWeights selected{weights[0], weights[1], {}, {}, {}};
  if (layers.has_biases) {
    selected.input_bias = weights[2];
    selected.hidden_bias = weights[3];
  }
  if (has_projection) selected.projection = weights[count - 1];
  return selected;
}

CellState step_lstm(const Tensor& from_input, const CellState& state, const CellWeights& weights) {
  Tensor gates = at::linear(state.hidden, weights.hidden, weights.hidden_bias).add_(from_input);
  auto parts = gates.unsafe_chunk(4, 1);
  Tensor in = parts[0].sigmoid_(), forget = parts[1].sigmoid_(), candidate = parts[2].tanh_();
  Tensor out = parts[3].sigmoid_();
  Tensor cell = (forget * state.cell).add_(in * candidate);
  Tensor hidden = out * cell.tanh();
  if (weights.projection.defined()) hidden = at::matmul(hidden, weights.projection.t());
  return {hidden, cell};
}

CellState step_gru(const Tensor& from_input, const CellState& state, const CellWeights& weights) {
  auto inputs = from_input.unsafe_chunk(3, 1);
  auto hiddens = at::linear(state.hidden, weights.hidden, weights.hidden_bias).unsafe_chunk(3, 1);
  Tensor reset = hiddens[0].add_(inputs[0]).sigmoid_();
  Tensor update = hiddens[1].add_(inputs[1]).sigmoid_();
  Tensor candidate = inputs[2].add(hiddens[2].mul_(reset)).tanh_();
  return {(state.hidden - candidate).mul_(update).add_(candidate), {}};
}

CellState step(RecurrentMode mode, const Tensor& from_input, const CellState& state,
               const CellWeights& weights) {
  if (mode == RecurrentMode::Lstm) return step_lstm(from_input, state, weights);
  if (mode == RecurrentMode::Gru) return step_gru(from_input, state, weights);
  Tensor sum = at::linear(state.hidden, weights.hidden, weights.hidden_bias).add_(from_input);
  return {mode == RecurrentMode::Tanh ? sum.tanh() : sum.relu(), {}};
}

// One layer in one direction: the output of all steps, and the final state.
std::pair<Tensor, CellState> run_layer(RecurrentMode mode, const Tensor& input, CellState state,
                                       const CellWeights& weights, bool backwards) {
  auto inputs = at::linear(input, weights.input, weights.input_bias).unbind(0);
  TORCH_CHECK(!inputs.empty(), "Expected sequence length to be larger than 0 in RNN");
  if (backwards) std::reverse(inputs.begin(), inputs.end());
  std::vector<Tensor> outputs;
  for (const Tensor& each : inputs) {
    state = step(mode, each, state, weights);
    outputs.push_back(state.hidden);
  }
  if (backwards) std::reverse(outputs.begin(), outputs.end());
  return {at::stack(outputs, 0), state};
}

}  // namespace

RecurrentResult run_recurrent_steps(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                    const RecurrentLayers& layers) {
  const int64_t directions = layers.direction_count();
  auto hiddens = hidden.unbind(0);
  auto cells = cell.defined() ? cell.unbind(0) : std::vector<Tensor>(hiddens.size());
  TORCH_CHECK(hiddens.size() == static_cast<size_t>(layers.layer_count * directions) &&
                  cells.size() == hiddens.size(),
              "Expected hidden state of ", layers.layer_count * directions, " layers and directions, got ",
              hiddens.size());
  bool has_projection = cell.defined() && cell.size(2) != hidden.size(2);
  Tensor between = layers.batch_first ? input.transpose(0, 1) : input;
  std::vector<Tensor> final_hiddens, final_cells;
  for (int64_t layer = 0; layer < layers.layer_count; layer++) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; direction++) {
      int64_t number = layer * directions + direction;
      auto at_number = static_cast<size_t>(number);
      auto [output, state] = run_layer(layers.mode, between, {hiddens[at_number], cells[at_number]},
                                       select_weights(layers, number, has_projection), direction > 0);
      outputs.push_back(output);
      final_hiddens.push_back(state.hidden);
      final_cells.push_back(state.cell);
    }
    between = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (layers.drops_out() && layer + 1 < layers.layer_count)
      between = at::dropout(between, layers.dropout, /*train=*/true);
  }
  return {layers.batch_first ? between.transpose(0, 1) : between, at::stack(final_hiddens, 0),
          cell.defined() ? at::stack(final_cells, 0) : Tensor()};
}

}  // namespace genie
