// See template_checks.h.
#include "template_checks.h"

#include <algorithm>
#include <initializer_list>
#include <unordered_map>

#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "failure.h"

namespace genie {

namespace {

using Sizes = std::vector<int64_t>;

// The arguments of a template by name.
class TemplateArguments {
 public:
  TemplateArguments(const DecodedTemplate& decoded, c10::Device device) : decoded_(decoded), device_(device) {
    const auto& declared = decoded.op->schema().arguments();
    for (size_t i = 0; i < declared.size(); i++) by_name_.emplace(declared[i].name(), &decoded.arguments[i]);
  }

  c10::Device device() const { return device_; }

  void require(bool condition, const char* requirement) const {
    if (!condition) throw OpRefused(requirement);
  }

  bool has_argument(const char* name) const { return by_name_.count(name) > 0; }
  bool has_tensor(const char* name) const { return at(name).kind == ArgumentKind::Tensor; }

  const TensorMeta& tensor(const char* name) const {
    if (!has_tensor(name)) throw OpRefused(std::string("argument '") + name + "' must be a tensor");
    return *at(name).meta;
  }

  // The items of a list of tensors.
  const std::vector<TemplateArgument>& tensors(const char* name) const {
    for (const TemplateArgument& item : at(name).items) {
      if (item.kind != ArgumentKind::Tensor)
        throw OpRefused(std::string("argument '") + name + "' must be a list of tensors");
    }
    return at(name).items;
  }

  const c10::IValue& constant(const char* name) const {
    if (at(name).kind != ArgumentKind::Integer)
      throw OpRefused(std::string("argument '") + name + "' must be a constant");
    return at(name).constant;
  }

  // A contiguous tensor of this dtype and shape.
  void require_tensor(const char* name, c10::ScalarType dtype, const Sizes& sizes) const {
    const TensorMeta& found = tensor(name);
    if (!is_tensor_of(found, dtype, sizes) || !is_contiguous(found) || found.flags != 0) {
      throw OpRefused(std::string("argument '") + name + "' must be a contiguous " +
                      describe_tensor(dtype, sizes) + ", not " + describe_tensor(found.dtype, found.sizes));
    }
  }

  static bool is_tensor_of(const TensorMeta& meta, c10::ScalarType dtype, const Sizes& sizes) {
    return meta.dtype == dtype && Sizes(meta.sizes.begin(), meta.sizes.end()) == sizes;
  }

 private:
  static bool is_contiguous(const TensorMeta& meta) {
    int64_t expected = 1;
    for (size_t i = meta.sizes.size(); i-- > 0;) {
      if (meta.sizes[i] != 1 && meta.strides[i] != expected) return false;
      expected *= meta.sizes[i];
    }
    return true;
  }

  const TemplateArgument& at(const char* name) const { return *by_name_.at(name); }

  const DecodedTemplate& decoded_;
  c10::Device device_;
  std::unordered_map<std::string, const TemplateArgument*> by_name_;
};

// --- LSTM layers of oneDNN ------------------------------------------------------------------------

struct LstmLayerSizes {
  int64_t steps, batch, inputs, hidden;
  c10::ScalarType dtype;
};

struct LstmLayerNames {
  const char *weights[4], *state, *cell;
};
constexpr LstmLayerNames FORWARD_NAMES{{"weight0", "weight1", "weight2", "weight3"}, "hx_", "cx_"};
constexpr LstmLayerNames BACKWARD_NAMES{{"weight1", "weight2", "weight3", "weight4"}, "hx_", "cx_tmp"};

LstmLayerSizes check_lstm_layer(const TemplateArguments& arguments, const LstmLayerNames& names) {
  constexpr int64_t LSTM_MODE = 2;
  arguments.require(arguments.device().is_cpu(), "oneDNN's LSTM needs a CPU");
  arguments.require(arguments.constant("mode").toInt() == LSTM_MODE, "argument 'mode' must be 2 (LSTM)");
  arguments.require(arguments.constant("batch_sizes").toListRef().empty(),
                    "argument 'batch_sizes' must be empty");
  const TensorMeta& input = arguments.tensor("input");
  arguments.require(input.sizes.size() == 3, "argument 'input' must have three dimensions");
  LstmLayerSizes sizes{input.sizes[0], input.sizes[1], input.sizes[2],
                       arguments.constant("hidden_size").toInt(), input.dtype};
  arguments.require(sizes.dtype == at::kFloat || sizes.dtype == at::kBFloat16,
                    "argument 'input' must be float32 or bfloat16");
  arguments.require(sizes.steps > 0 && sizes.batch > 0 && sizes.inputs > 0 && sizes.hidden > 0,
                    "argument 'input' and the hidden state must not be empty");
  arguments.require(sizes.hidden <= INT32_MAX, "argument 'hidden_size' is too large");
  const int64_t gates = 4 * sizes.hidden;
  arguments.require_tensor("input", sizes.dtype, {sizes.steps, sizes.batch, sizes.inputs});
  arguments.require_tensor(names.weights[0], sizes.dtype, {gates, sizes.inputs});
  arguments.require_tensor(names.weights[1], sizes.dtype, {gates, sizes.hidden});
  if (arguments.constant("has_biases").toBool()) {
    arguments.require_tensor(names.weights[2], sizes.dtype, {gates});
    arguments.require_tensor(names.weights[3], sizes.dtype, {gates});
  }
  arguments.require_tensor(names.state, sizes.dtype, {sizes.batch, sizes.hidden});
  arguments.require_tensor(names.cell, sizes.dtype, {sizes.batch, sizes.hidden});
  return sizes;
}

void check_lstm_layer_forward(const TemplateArguments& arguments) {
  check_lstm_layer(arguments, FORWARD_NAMES);
}

// Only oneDNN knows the size of the workspace, so a forward pass over zeros makes one.
int64_t count_lstm_workspace_bytes(const LstmLayerSizes& sizes, bool reverse) {
  c10::AutoGradMode creates_workspace(true);
  auto zeros = [&](const Sizes& shape) { return at::zeros(shape, at::TensorOptions().dtype(sizes.dtype)); };
  const int64_t gates = 4 * sizes.hidden;
  auto results = at::mkldnn_rnn_layer(
      zeros({sizes.steps, sizes.batch, sizes.inputs}), zeros({gates, sizes.inputs}),
      zeros({gates, sizes.hidden}), zeros({gates}), zeros({gates}), zeros({sizes.batch, sizes.hidden}),
      zeros({sizes.batch, sizes.hidden}), reverse, {}, /*mode=*/2, sizes.hidden, /*num_layers=*/1,
      /*has_biases=*/true, /*bidirectional=*/false,
      /*batch_first=*/false, /*train=*/true);
  return std::get<3>(results).numel();
}

void check_lstm_layer_backward(const TemplateArguments& arguments) {
  LstmLayerSizes sizes = check_lstm_layer(arguments, BACKWARD_NAMES);
  const Sizes state{sizes.batch, sizes.hidden}, output{sizes.steps, sizes.batch, sizes.hidden};
  arguments.require_tensor("output", sizes.dtype, output);
  arguments.require_tensor("hy_", sizes.dtype, state);
  arguments.require_tensor("cy_", sizes.dtype, state);
  auto require_sizes = [&](const char* name, const Sizes& expected) {
    if (!arguments.has_tensor(name)) return;
    arguments.require(TemplateArguments::is_tensor_of(arguments.tensor(name), sizes.dtype, expected),
                      "a gradient must have the shape and the dtype of its output");
  };
  require_sizes("grad_output", output);
  require_sizes("grad_hy", state);
  require_sizes("grad_cy", state);
  int64_t workspace_bytes = count_lstm_workspace_bytes(sizes, arguments.constant("reverse").toBool());
  arguments.require_tensor("workspace", at::kByte, {workspace_bytes});
}

// torch passes the arguments of a whole LSTM on a CPU to oneDNN without checking them.
void check_lstm(const TemplateArguments& arguments) {
  if (!arguments.device().is_cpu() || !arguments.has_argument("input")) return;  // else the input is packed
  const TensorMeta& input = arguments.tensor("input");
  const auto& states = arguments.tensors("hx");
  const auto& weights = arguments.tensors("params");
  arguments.require(input.sizes.size() == 3, "argument 'input' must have three dimensions");
  arguments.require(
      states.size() == 2 && states[0].meta->sizes.size() == 3 && states[1].meta->sizes.size() == 3,
      "argument 'hx' must be two tensors of three dimensions");
  if (states[0].meta->sizes[2] != states[1].meta->sizes[2])
    return;  // a projection, which oneDNN does not have
  const int64_t layers = arguments.constant("num_layers").toInt();
  const int64_t directions = arguments.constant("bidirectional").toBool() ? 2 : 1;
  const size_t per_layer = arguments.constant("has_biases").toBool() ? 4 : 2;
  arguments.require(
      layers > 0 && layers <= LIST_ITEMS_MAX &&
          weights.size() == static_cast<size_t>(layers * directions) * per_layer,
      "argument 'params' must have two weights, or two weights and two biases, for each layer and "
      "direction");
  const int64_t hidden = states[0].meta->sizes[2], gates = 4 * hidden;
  const Sizes state{layers * directions, input.sizes[arguments.constant("batch_first").toBool() ? 0 : 1],
                    hidden};
  for (const TemplateArgument& each : states)
    arguments.require(TemplateArguments::is_tensor_of(*each.meta, input.dtype, state),
                      "argument 'hx' must have the shape [layers * directions, batch, hidden]");
  for (size_t i = 0; i < weights.size(); i++) {
    const bool is_first_layer = i < per_layer * static_cast<size_t>(directions);
    const Sizes expected = i % per_layer == 0
                               ? Sizes{gates, is_first_layer ? input.sizes[2] : hidden * directions}
                           : i % per_layer == 1 ? Sizes{gates, hidden}
                                                : Sizes{gates};
    arguments.require(
        TemplateArguments::is_tensor_of(*weights[i].meta, input.dtype, expected),
        "argument 'params' has a weight of another shape or dtype than the input and 'hx' need");
  }
}

// --- quantized weights ------------------------------------------------------------------------------

bool is_one_of(int64_t value, std::initializer_list<int64_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), value) != allowed.end();
}

const TensorMeta& require_matrix(const TemplateArguments& arguments, const char* name) {
  const TensorMeta& matrix = arguments.tensor(name);
  arguments.require(matrix.sizes.size() == 2 && matrix.sizes[0] > 0 && matrix.sizes[1] > 0,
                    "the input must be a matrix that is not empty");
  arguments.require(is_one_of(static_cast<int64_t>(matrix.dtype),
                              {static_cast<int64_t>(at::kFloat), static_cast<int64_t>(at::kHalf),
                               static_cast<int64_t>(at::kBFloat16)}),
                    "the input must be float32, float16 or bfloat16");
  return matrix;
}

// The scales and zero points of groups of weights, for an input of `columns` columns.
void check_group_scales(const TemplateArguments& arguments, const TensorMeta& input, int64_t rows) {
  const int64_t group = arguments.constant("qGroupSize").toInt(), columns = input.sizes[1];
  arguments.require(is_one_of(group, {32, 64, 128, 256}), "argument 'qGroupSize' must be 32, 64, 128 or 256");
  arguments.require(columns % group == 0, "the columns of the input must be a multiple of 'qGroupSize'");
  arguments.require_tensor("qScaleAndZeros", input.dtype, {columns / group, rows, 2});
}

void check_int4_matmul_on_cpu(const TemplateArguments& arguments) {
  arguments.require(arguments.device().is_cpu(), "the op needs a CPU");
  const TensorMeta& input = require_matrix(arguments, "self");
  const TensorMeta& weight = arguments.tensor("mat2");
  arguments.require(weight.sizes.size() == 2 && weight.sizes[0] > 0 && weight.sizes[0] % 16 == 0,
                    "argument 'mat2' must be a matrix with a multiple of 16 rows");
  arguments.require_tensor("self", input.dtype, {input.sizes[0], input.sizes[1]});
  arguments.require_tensor("mat2", at::kByte, {weight.sizes[0], input.sizes[1] / 2});
  check_group_scales(arguments, input, weight.sizes[0]);
}

void check_int4_matmul_on_gpu(const TemplateArguments& arguments) {
  arguments.require(!arguments.device().is_cpu(), "the op needs a GPU");
  const TensorMeta& input = require_matrix(arguments, "self");
  const TensorMeta& weight = arguments.tensor("mat2");
  arguments.require(weight.sizes.size() == 4 && weight.sizes[0] > 0 && is_one_of(weight.sizes[3], {1, 2, 4}),
                    "argument 'mat2' must have four dimensions, the last one of size 1, 2 or 4");
  const int64_t block_columns = 2 * weight.sizes[3] * 16;
  arguments.require(input.sizes[1] % block_columns == 0,
                    "the columns of the input must be a multiple of the columns of a block of weights");
  arguments.require_tensor("self", at::kBFloat16, {input.sizes[0], input.sizes[1]});
  arguments.require_tensor("mat2", at::kInt,
                           {weight.sizes[0], input.sizes[1] / block_columns, 32, weight.sizes[3]});
  check_group_scales(arguments, input, weight.sizes[0] * 8);
}

void check_int4_packing_on_gpu(const TemplateArguments& arguments) {
  arguments.require(!arguments.device().is_cpu(), "the op needs a GPU");
  const TensorMeta& weight = arguments.tensor("self");
  const int64_t tiles = arguments.constant("innerKTiles").toInt();
  arguments.require(is_one_of(tiles, {2, 4, 8}), "argument 'innerKTiles' must be 2, 4 or 8");
  arguments.require(
      weight.sizes.size() == 2 && weight.sizes[0] > 0 && weight.sizes[0] % 8 == 0 && weight.sizes[1] > 0 &&
          2 * weight.sizes[1] % (tiles * 16) == 0,
      "argument 'self' must be a matrix whose rows are a multiple of 8, and whose columns are a "
      "multiple of 8 * innerKTiles");
  arguments.require_tensor("self", at::kByte, {weight.sizes[0], weight.sizes[1]});
}

void check_int8_matmul(const TemplateArguments& arguments) {
  const TensorMeta& input = require_matrix(arguments, "self");
  const TensorMeta& weight = arguments.tensor("mat2");
  arguments.require(weight.sizes.size() == 2 && weight.sizes[0] > 0, "argument 'mat2' must be a matrix");
  arguments.require_tensor("self", input.dtype, {input.sizes[0], input.sizes[1]});
  arguments.require_tensor("mat2", at::kChar, {weight.sizes[0], input.sizes[1]});
  arguments.require_tensor("scales", input.dtype, {weight.sizes[0]});
}

// --- fake quantization ------------------------------------------------------------------------------

void require_numbers(const TemplateArguments& arguments, std::initializer_list<const char*> names,
                     int64_t count) {
  for (const char* name : names) {
    const TensorMeta& found = arguments.tensor(name);
    int64_t elements = 1;
    for (int64_t size : found.sizes) elements *= size;
    if (elements < count) throw OpRefused(std::string("argument '") + name + "' has too few elements");
  }
}

void check_fake_quantize_with_tensors(const TemplateArguments& arguments) {
  require_numbers(arguments, {"scale", "zero_point", "fake_quant_enabled"}, 1);
}

void check_moving_average_fake_quantize(const TemplateArguments& arguments) {
  require_numbers(arguments, {"observer_on", "fake_quant_on", "scale", "zero_point"}, 1);
  if (!arguments.constant("per_row_fake_quant").toBool()) {
    require_numbers(arguments, {"running_min", "running_max"}, 1);
    return;
  }
  const TensorMeta& input = arguments.tensor("self");
  const int64_t axis = arguments.constant("ch_axis").toInt();
  arguments.require(axis >= 0 && axis < static_cast<int64_t>(input.sizes.size()),
                    "argument 'ch_axis' must be a dimension of the input");
  const int64_t rows = input.sizes[static_cast<size_t>(axis)];
  const TensorMeta& minimum = arguments.tensor("running_min");
  bool is_first_call = minimum.sizes.size() == 1 && minimum.sizes[0] == 0;  // it resizes all of them
  if (!is_first_call) require_numbers(arguments, {"running_min", "running_max", "scale", "zero_point"}, rows);
}

using TemplateCheck = void (*)(const TemplateArguments&);

const std::unordered_map<std::string, TemplateCheck>& template_checks() {
  static const std::unordered_map<std::string, TemplateCheck> checks = {
      {"aten::_convert_weight_to_int4pack", &check_int4_packing_on_gpu},
      {"aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", &check_fake_quantize_with_tensors},
      {"aten::_fused_moving_avg_obs_fq_helper", &check_moving_average_fake_quantize},
      {"aten::_weight_int4pack_mm", &check_int4_matmul_on_gpu},
      {"aten::_weight_int4pack_mm_for_cpu", &check_int4_matmul_on_cpu},
      {"aten::_weight_int8pack_mm", &check_int8_matmul},
      {"aten::lstm", &check_lstm},
      {"aten::mkldnn_rnn_layer", &check_lstm_layer_forward},
      {"aten::mkldnn_rnn_layer_backward", &check_lstm_layer_backward}};
  return checks;
}

}  // namespace

void check_template(const DecodedTemplate& decoded, c10::Device device) {
  auto check = template_checks().find(decoded.op->schema().name());
  if (check == template_checks().end()) return;
  try {
    check->second(TemplateArguments(decoded, device));
  } catch (const c10::Error& error) {
    throw OpRefused(error.what_without_backtrace());
  }
}

}  // namespace genie
