// LSTM, GRU and RNN composed of one small op after the other, as torch does on CPUs.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace genie {

// The numbers that cuDNN and oneDNN use.
enum class RecurrentMode : int64_t { Relu = 0, Tanh = 1, Lstm = 2, Gru = 3 };

struct RecurrentLayers {
  RecurrentMode mode;
  at::TensorList weights;
  bool has_biases;
  int64_t layer_count;
  double dropout;
  bool train, bidirectional, batch_first;

  int64_t direction_count() const { return bidirectional ? 2 : 1; }
  bool drops_out() const { return train && dropout > 0 && layer_count > 1; }
};

struct RecurrentResult {
  at::Tensor output, hidden, cell;  // `cell` is undefined unless it is an LSTM
};

// For executors on CPUs: torch composes the ops for other devices in another way, with other rounding. Not
// for packed inputs. `cell` is undefined unless it is an LSTM.
RecurrentResult run_recurrent_steps(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
                                    const RecurrentLayers& layers);

}  // namespace genie
