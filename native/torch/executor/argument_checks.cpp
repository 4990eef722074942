#include "argument_checks.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>

#include "../wire.h"
#include "op_arguments.h"
#include "spatial_checks.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IntArrayRef;

// --- batch norm and other normalizations --------------------------------------------------------

// One number for each channel of the input, or none.
void check_channel_tensors(OpArguments& args, const Tensor& input, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const Tensor* tensor = args.find_tensor(name);
    if (tensor) args.require_sizes(name, {input.size(1)});
  }
}

void require_running_statistics(const OpArguments& args) {
  for (const char* name : {"running_mean", "running_var"})
    args.require(args.find_tensor(name), std::string(name) + " is missing");
}

void check_batch_norm(OpArguments& args) {
  const Tensor& input = args.tensor("input");
  args.require(input.dim() >= 2, "input must have at least 2 dimensions");
  check_channel_tensors(args, input, {"weight", "bias", "running_mean", "running_var"});
  if (args.has_argument("training") && !args.boolean("training")) require_running_statistics(args);
}

void check_batch_norm_without_training(OpArguments& args) {
  check_batch_norm(args);
  require_running_statistics(args);
}

// `saved_scale` is the second saved statistic, `training` the argument that says which ones are used.
void check_batch_norm_backward(OpArguments& args, const char* saved_scale, const char* training) {
  const Tensor& input = args.tensor("input");
  args.require(input.dim() >= 2, "input must have at least 2 dimensions");
  args.require_sizes(args.has_argument("grad_out") ? "grad_out" : "grad_output", input.sizes());
  check_channel_tensors(args, input, {"weight", "running_mean", "running_var"});
  bool uses_saved = args.boolean(training);
  for (const char* name : {"save_mean", saved_scale}) {
    const Tensor* saved = args.find_tensor(name);
    // Ops that do not train save empty tensors.
    if (saved && (uses_saved || saved->numel() != 0)) args.require_sizes(name, {input.size(1)});
    args.require(saved || !uses_saved, std::string(name) + " is missing");
  }
  if (!uses_saved) require_running_statistics(args);
}

void check_native_batch_norm_backward(OpArguments& args) {
  check_batch_norm_backward(args, "save_invstd", "train");
}

void check_unified_batch_norm_backward(OpArguments& args) {
  check_batch_norm_backward(args, "save_var", "update");
}

void check_cudnn_batch_norm_backward(OpArguments& args) {
  const Tensor& input = args.tensor("input");
  args.require(input.dim() >= 2, "input must have at least 2 dimensions");
  args.require_sizes("grad_output", input.sizes());
  check_channel_tensors(args, input, {"weight", "save_mean", "save_var"});
}

// Ops of synchronized batch norm.
void check_batch_norm_parts(OpArguments& args) {
  const Tensor& input = args.tensor("input");
  args.require(input.dim() >= 2, "input must have at least 2 dimensions");
  if (args.find_tensor("grad_out")) args.require_sizes("grad_out", input.sizes());
  check_channel_tensors(
      args, input,
      {"weight", "bias", "mean", "invstd", "sum_dy", "sum_dy_xmu", "running_mean", "running_var"});
}

int64_t rows_before(const Tensor& input, IntArrayRef normalized_shape) {
  auto leading = static_cast<size_t>(input.dim()) - normalized_shape.size();
  return c10::multiply_integers(input.sizes().slice(0, leading));
}

void check_row_norm_backward(OpArguments& args) {
  const Tensor& input = args.tensor("input");
  auto normalized_shape = args.integers("normalized_shape");
  args.require(normalized_shape.size() <= static_cast<size_t>(input.dim()),
               "normalized_shape has more dimensions than input");
  args.require_sizes("grad_out", input.sizes());
  for (const char* name : {"mean", "rstd"})
    if (args.find_tensor(name)) args.require_count(name, rows_before(input, normalized_shape));
  if (args.find_tensor("weight")) args.require_sizes("weight", normalized_shape);
}

void check_softmax_backward(OpArguments& args) {
  args.require_sizes("output", args.tensor("grad_output").sizes());
}

void check_weight_norm(OpArguments& args) {
  args.make_dense({"v", "g", "saved_v", "saved_g", "saved_norms", "grad_w"});
  bool forward = args.has_argument("v");
  const Tensor& v = args.tensor(forward ? "v" : "saved_v");
  int64_t dim = args.integer("dim");
  args.require(v.numel() > 0 && (dim == 0 || dim == v.dim() - 1),
               "v must not be empty, and dim must be its first or last dimension");
  args.require_count(forward ? "g" : "saved_g", v.size(dim));
  if (forward) return;
  args.require_count("saved_norms", v.size(dim));
  args.require_sizes("grad_w", v.sizes());
}

// --- embeddings ---------------------------------------------------------------------------------

void check_embedding_dense_backward(OpArguments& args) {
  args.bound_indices("indices", 0, args.integer("num_weights"), CompiledCode::ChecksIndices);
}

void check_embedding_renorm(OpArguments& args) {
  const Tensor& weight = args.tensor("self");
  args.require(weight.dim() == 2, "self must have 2 dimensions");
  args.bound_indices("indices", 0, weight.size(0));
}

void check_per_sample_weights(OpArguments& args) {
  if (args.find_tensor("per_sample_weights"))
    args.require_count("per_sample_weights", args.tensor("indices").numel());
}

void check_embedding_bag(OpArguments& args) {
  const Tensor& weight = args.tensor("weight");
  args.require(weight.dim() == 2 && args.tensor("indices").dim() == 1 && args.tensor("offsets").dim() == 1,
               "weight must have 2 dimensions, indices and offsets 1");
  check_per_sample_weights(args);
  args.make_dense({"indices", "offsets", "per_sample_weights"});
  args.bound_indices("indices", 0, weight.size(0));
  args.bound_indices("offsets", 0, args.tensor("indices").numel() + 1);
  int64_t indices = args.tensor("indices").numel();
  bool has_end = args.boolean("include_last_offset");
  args.require(args.tensor("offsets").numel() > has_end || (indices == 0 && !has_end), "offsets has no bags");
  if (!weight.is_cpu()) return;  // CUDA kernels assert the order
  auto offsets = args.host_integers("offsets");
  args.require(std::is_sorted(offsets.begin(), offsets.end()), "offsets must be ascending");
  args.require(!has_end || offsets.back() == indices, "the last offset must be the number of indices");
}

// For kernels that compute the bag of each index from the offsets if `offset2bag` is empty.
void check_bags(OpArguments& args, int64_t bags, bool may_be_empty) {
  int64_t indices = args.tensor("indices").numel();
  if (!may_be_empty || args.tensor("offset2bag").numel() != 0) {
    args.require_count("offset2bag", indices);
    return args.bound_indices("offset2bag", 0, bags);
  }
  const Tensor& offsets = args.tensor("offsets");
  auto begins = args.host_integers(offsets);
  bool last_is_end = static_cast<int64_t>(begins.size()) == bags + 1 && begins.back() == indices;
  args.require(offsets.dim() == 1 && std::is_sorted(begins.begin(), begins.end()) &&
                   (begins.empty() || (begins.front() == 0 && begins.back() <= indices)) &&
                   (last_is_end || static_cast<int64_t>(begins.size()) <= bags) &&
                   (indices == 0 || !begins.empty()),
               "offsets do not divide indices into the bags of grad");
}

void check_embedding_bag_gradient(OpArguments& args, bool may_be_empty) {
  constexpr int64_t MODE_MAX = 2;
  const Tensor& grad = args.tensor("grad");
  args.require(grad.dim() == 2 && args.tensor("indices").dim() == 1,
               "grad must have 2 dimensions, indices 1");
  int64_t bags = grad.size(0), weights = args.integer("num_weights");
  args.require(args.tensor("bag_size").numel() >= bags, "bag_size is smaller than the number of bags");
  check_per_sample_weights(args);
  args.make_dense({"indices", "offsets", "offset2bag", "bag_size", "maximum_indices", "per_sample_weights"});
  check_bags(args, bags, may_be_empty);
  args.bound_indices("indices", 0, weights);
  if (args.integer("mode") != MODE_MAX) return;
  args.require_sizes("maximum_indices", grad.sizes());
  args.bound_indices("maximum_indices", -1, weights);
}

void check_embedding_bag_dense_backward(OpArguments& args) { check_embedding_bag_gradient(args, false); }
void check_embedding_bag_backward(OpArguments& args) { check_embedding_bag_gradient(args, true); }

void check_embedding_bag_weights_backward(OpArguments& args) {
  const Tensor& grad = args.tensor("grad");
  const Tensor& weight = args.tensor("weight");
  args.require(grad.dim() == 2 && weight.dim() == 2 && grad.size(1) == weight.size(1),
               "grad and weight must have 2 dimensions and equal columns");
  args.make_dense({"indices", "offsets", "offset2bag"});
  check_bags(args, grad.size(0), true);
  args.bound_indices("indices", 0, weight.size(0));
}

// --- losses -------------------------------------------------------------------------------------

// Of losses whose kernels read one gradient, or one for each row.
void check_margin_loss_backward(OpArguments& args) {
  constexpr int64_t REDUCTION_NONE = 0;
  const Tensor& input = args.tensor("self");
  bool by_row = args.integer("reduction") == REDUCTION_NONE && input.dim() > 1;
  args.require_count("grad_output", by_row ? input.size(0) : 1);
}

void check_multi_margin_loss_backward(OpArguments& args) { check_margin_loss_backward(args); }

void check_multilabel_margin_loss(OpArguments& args) {
  const Tensor& input = args.tensor("self");
  args.require_sizes("target", input.sizes());
  args.bound_indices("target", -1, input.dim() == 0 ? 1 : input.size(-1));
  if (!args.has_argument("grad_output")) return;
  check_margin_loss_backward(args);
  args.require_count("is_target", args.tensor("target").numel());
}

// The gradient of a loss over classes: one number, or one for each target.
void check_nll_loss_backward(OpArguments& args) {
  constexpr int64_t REDUCTION_NONE = 0;
  const Tensor& input = args.tensor("self");
  const Tensor& target = args.tensor("target");
  args.require(input.dim() > 0, "self must have dimensions");
  args.require_count("total_weight", 1);
  bool by_target = args.integer("reduction") == REDUCTION_NONE;
  args.require_count("grad_output", by_target ? target.numel() : 1);
  int64_t classes = input.dim() == 1 ? input.size(0) : input.size(1);
  if (args.find_tensor("weight")) args.require_count("weight", classes);
}

void check_ctc_loss(OpArguments& args) {
  const Tensor& probabilities = args.tensor("log_probs");
  const Tensor& targets = args.tensor("targets");
  args.require(probabilities.dim() == 3 && (targets.dim() == 1 || targets.dim() == 2),
               "log_probs must have 3 dimensions, targets 1 or 2");
  int64_t steps = probabilities.size(0), batch = probabilities.size(1), labels = probabilities.size(2);
  int64_t blank = args.integer("blank");
  args.require(blank >= 0 && blank < labels, "blank is not a label");
  auto input_lengths = args.host_integers("input_lengths");
  auto target_lengths = args.host_integers("target_lengths");
  args.require(static_cast<int64_t>(input_lengths.size()) == batch &&
                   static_cast<int64_t>(target_lengths.size()) == batch,
               "input_lengths and target_lengths must have one number for each sequence");
  int64_t longest = 0, in_all = 0, room = targets.dim() == 1 ? targets.numel() : targets.size(1);
  for (int64_t length : input_lengths)
    args.require(length >= 0 && length <= steps, "an input length is out of range");
  for (int64_t length : target_lengths) {
    args.require(length >= 0 && length <= room, "a target length is out of range");
    longest = std::max(longest, length);
    in_all += length;
  }
  args.require(targets.dim() == 2 ? targets.size(0) == batch : in_all <= room,
               "targets do not match target_lengths");
  args.make_dense({"targets"});
  args.bound_indices("targets", 0, labels);
  if (!args.has_argument("log_alpha")) return;
  const Tensor& alpha = args.tensor("log_alpha");
  args.require_count("grad", batch);
  args.require_count("neg_log_likelihood", batch);
  args.require(alpha.dim() == 3 && alpha.size(0) == batch && alpha.size(1) == steps &&
                   alpha.size(2) == 2 * longest + 1,
               "log_alpha is not of these arguments");
}

// --- segments, distances ------------------------------------------------------------------------

// `values` are lengths of segments, or the offset of each and the end of the last, in rows of `per_row`.
void check_segments(OpArguments& args, const char* name, int64_t axis_size, bool are_lengths) {
  const Tensor& tensor = args.tensor(name);
  auto values = args.host_integers(tensor);
  auto per_row = static_cast<size_t>(tensor.dim() ? tensor.size(-1) : 1);
  for (size_t row = 0; per_row && row < values.size(); row += per_row) {
    auto begin = values.begin() + static_cast<ptrdiff_t>(row), end = begin + static_cast<ptrdiff_t>(per_row);
    for (auto at = begin; at != end; at++)
      args.require(*at >= 0 && *at <= axis_size, std::string(name) + " are out of range");
    args.require(
        are_lengths ? std::accumulate(begin, end, int64_t{0}) <= axis_size : std::is_sorted(begin, end),
        std::string(name) + " exceed the data");
  }
}

void check_segment_reduce(OpArguments& args) {
  const Tensor& data = args.tensor("data");
  int64_t axis = args.integer("axis");
  args.require(axis >= 0 && axis < data.dim(), "axis is out of range");
  for (const char* name : {"lengths", "offsets"}) {
    const Tensor* segments = args.find_tensor(name);
    if (!segments) continue;
    bool are_lengths = name[0] == 'l';
    auto leading = static_cast<size_t>(axis);
    args.require(
        segments->dim() == axis + 1 && segments->sizes().slice(0, leading) == data.sizes().slice(0, leading),
        std::string(name) + " must have the sizes of data before axis");
    check_segments(args, name, data.size(axis), are_lengths);
    if (!args.has_argument("grad")) continue;
    auto sizes = data.sizes().vec();
    sizes[leading] = segments->size(axis) - (are_lengths ? 0 : 1);
    args.require_sizes("grad", sizes);
    args.require_sizes("output", sizes);
  }
}

void check_cdist_backward(OpArguments& args) {
  const Tensor &one = args.tensor("x1"), &other = args.tensor("x2");
  args.require(one.dim() >= 2 && other.dim() >= 2 && one.size(-1) == other.size(-1),
               "x1 and x2 must have 2 or more dimensions and equal columns");
  auto batch = at::infer_size(one.sizes().slice(0, static_cast<size_t>(one.dim() - 2)),
                              other.sizes().slice(0, static_cast<size_t>(other.dim() - 2)));
  batch.push_back(one.size(-2));
  batch.push_back(other.size(-2));
  args.require_sizes("grad", batch);
  args.require_sizes("cdist", batch);
}

void check_pdist(OpArguments& args) {
  const Tensor& input = args.tensor("self");
  args.require(input.dim() == 2, "self must have 2 dimensions");
  if (!args.has_argument("grad")) return;
  args.require(input.size(0) > 0, "self must have rows");
  auto rows = static_cast<__int128>(input.size(0));
  auto pairs = static_cast<int64_t>(rows * (rows - 1) / 2);
  args.require_sizes("grad", {pairs});
  args.require_sizes("pdist", {pairs});
  args.make_dense({"self", "pdist"});
}

// --- transforms ---------------------------------------------------------------------------------

void check_fft(OpArguments& args) {
  const Tensor& input = args.tensor("self");
  std::vector<bool> seen(static_cast<size_t>(input.dim()));
  auto dims = args.integers("dim");
  for (int64_t dim : dims) {  // torch.fft passes no negative ones
    args.require(dim >= 0 && dim < input.dim(), "dim is out of range");
    args.require(!seen[static_cast<size_t>(dim)], "dim contains a dimension twice");
    seen[static_cast<size_t>(dim)] = true;
  }
  bool to_real = args.has_argument("last_dim_size");
  if (to_real) {
    int64_t size = args.integer("last_dim_size");
    args.require(!dims.empty() && size > 0 && input.size(dims.back()) == size / 2 + 1,
                 "last_dim_size is out of range");
  }
  const Tensor* out = args.find_tensor("out");
  auto real = c10::toRealValueType(input.scalar_type());
  args.require(!out || out->scalar_type() == (to_real ? real : c10::toComplexType(real)),
               "out does not have the dtype of the result");
}

// --- matrices -----------------------------------------------------------------------------------

// LAPACK exchanges rows as the pivots say; they are counted from one.
void check_pivots(OpArguments& args, const char* factors, const char* pivots) {
  const Tensor& lu = args.tensor(factors);
  args.require(lu.dim() >= 2, std::string(factors) + " must have 2 or more dimensions");
  auto sizes = lu.sizes().vec();
  int64_t rows = lu.size(-2);
  sizes.pop_back();
  sizes.back() = std::min(rows, lu.size(-1));
  args.require_sizes(pivots, sizes);
  args.bound_indices(pivots, 1, rows + 1);
}

void check_linalg_lu_solve(OpArguments& args) { check_pivots(args, "LU", "pivots"); }
void check_lu_solve(OpArguments& args) { check_pivots(args, "LU_data", "LU_pivots"); }
void check_lu_unpack(OpArguments& args) {
  if (args.boolean("unpack_pivots")) check_pivots(args, "LU_data", "LU_pivots");
}

// A positive pivot is a row; a block of two rows has two negative ones.
void check_ldl_solve(OpArguments& args) {
  const Tensor& factors = args.tensor("LD");
  args.require(factors.dim() >= 2, "LD must have 2 or more dimensions");
  args.require_sizes("pivots", factors.sizes().slice(0, static_cast<size_t>(factors.dim() - 1)));
  auto pivots = args.host_integers("pivots");
  auto rows = static_cast<size_t>(factors.size(-2));
  for (size_t i = 0; i < pivots.size(); i++) {
    bool is_block = pivots[i] < 0;
    auto limit = static_cast<int64_t>(rows);
    args.require(pivots[i] != 0 && pivots[i] <= limit && pivots[i] >= -limit, "pivots are out of range");
    if (!is_block) continue;
    i++;
    args.require(i % rows != 0 && pivots[i] < 0 && pivots[i] >= -limit, "pivots have an incomplete block");
  }
}

void check_matrix_power(OpArguments& args) {
  args.require(args.integer("n") != std::numeric_limits<int64_t>::min(), "n is out of range");
}

// --- others -------------------------------------------------------------------------------------

void check_sobol(OpArguments& args) {
  constexpr int64_t BITS = 30;
  int64_t dimension = args.integer("dimension");
  args.require(dimension > 0, "dimension must be positive");
  if (args.has_argument("sobolstate")) {
    args.require_sizes("sobolstate", {dimension, BITS});
    args.require_sizes(args.has_argument("quasi") ? "quasi" : "self", {dimension});
    args.require(args.integer("n") >= 0 && args.integer("num_generated") >= 0, "a count is negative");
    args.make_dense({"sobolstate"});
  } else {
    args.require_sizes("self", {dimension, BITS});
    if (args.has_argument("ltm")) args.require_sizes("ltm", {dimension, BITS, BITS});
  }
}

void check_chunk_cat(OpArguments& args) {
  int64_t dim = args.integer("dim");
  args.require(args.integer("num_chunks") > 0, "num_chunks must be positive");
  for (const Tensor& tensor : args.tensors("tensors"))
    args.require(dim >= -tensor.dim() && dim < tensor.dim(), "dim is out of range");
}

void check_section_count(OpArguments& args) {
  for (const char* name : {"sections", "chunks"})
    args.require(!args.has_argument(name) || args.integer(name) <= LIST_ITEMS_MAX, "too many sections");
}

void check_median(OpArguments& args) { args.make_dense({"self"}); }

void check_as_strided(OpArguments& args) {
  for (const char* name : {"size", "stride"})
    for (int64_t number : args.integers(name)) args.require(number >= 0, std::string(name) + " is negative");
}

// With integers, these kernels divide by zero.
void check_floating_loss(OpArguments& args) {
  args.require(args.tensor("self").is_floating_point(), "self must be a tensor of floating point numbers");
}

void check_cumulative(OpArguments& args) {
  for (const char* name : {"values", "indices"}) args.require_sizes(name, args.tensor("self").sizes());
}

void check_logcumsumexp(OpArguments& args) {
  const Tensor* out = args.find_tensor("out");
  args.require(!out || out->scalar_type() == args.tensor("self").scalar_type(),
               "out does not have the dtype of self");
}

void check_grid_sampler_backward(OpArguments& args) {
  const Tensor& input = args.tensor(args.has_argument("input") ? "input" : "self");
  const Tensor& grid = args.tensor("grid");
  args.require(input.dim() >= 4 && grid.dim() == input.dim(), "input and grid must have 4 or 5 dimensions");
  auto sizes = grid.sizes().vec();
  sizes.pop_back();
  sizes.insert(sizes.begin() + 1, input.size(1));
  args.require_sizes("grad_output", sizes);
}

void check_group_norm(OpArguments& args) { args.make_dense({"weight", "bias", "mean", "rstd"}); }

void check_stack(OpArguments& args) {
  args.require(!args.tensors("tensors").empty(), "tensors must not be empty");
}

void check_rrelu(OpArguments& args) {
  const Tensor& input = args.tensor("self");
  args.require_sizes("noise", input.sizes());
  if (args.find_tensor("out")) args.require_sizes("out", input.sizes());
}

// Each list of a fused optimizer has one tensor of the same layout for each parameter, or is empty.
void check_fused_optimizer(OpArguments& args) {
  auto parameters = args.tensors("self");
  for (const char* name : {"self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs",
                           "momentum_buffer_list", "state_sums", "out"}) {
    if (!args.has_argument(name)) continue;
    auto tensors = args.tensors(name);
    if (tensors.empty() && name != std::string("grads")) continue;
    args.require(tensors.size() == parameters.size(), std::string(name) + " differ in number from self");
    for (size_t i = 0; i < tensors.size(); i++) {
      args.require(tensors[i].sizes() == parameters[i].sizes() &&
                       tensors[i].strides() == parameters[i].strides() &&
                       tensors[i].is_non_overlapping_and_dense(),
                   std::string(name) + " differ in layout from self");
    }
  }
  if (args.has_argument("state_steps"))
    args.require(args.tensors("state_steps").size() == parameters.size(),
                 "state_steps differ in number from self");
}

}  // namespace

ArgumentCheck find_argument_check(const std::string& op_name) {
  static const auto* checks = new std::unordered_map<std::string, ArgumentCheck>{
      {"_batch_norm_no_update", check_batch_norm_without_training},
      {"_batch_norm_with_update", check_batch_norm},
      {"_batch_norm_with_update_functional", check_batch_norm},
      {"_cdist_backward", check_cdist_backward},
      {"_chunk_cat", check_chunk_cat},
      {"_ctc_loss", check_ctc_loss},
      {"_ctc_loss_backward", check_ctc_loss},
      {"_cudnn_ctc_loss", check_ctc_loss},
      {"_cummax_helper", check_cumulative},
      {"_cummin_helper", check_cumulative},
      {"_embedding_bag", check_embedding_bag},
      {"_embedding_bag_backward", check_embedding_bag_backward},
      {"_embedding_bag_dense_backward", check_embedding_bag_dense_backward},
      {"_embedding_bag_forward_only", check_embedding_bag},
      {"_embedding_bag_per_sample_weights_backward", check_embedding_bag_weights_backward},
      {"_fft_c2c", check_fft},
      {"_fft_c2r", check_fft},
      {"_fft_r2c", check_fft},
      {"_fused_adagrad", check_fused_optimizer},
      {"_fused_adagrad_", check_fused_optimizer},
      {"_fused_adam", check_fused_optimizer},
      {"_fused_adam_", check_fused_optimizer},
      {"_fused_adamw", check_fused_optimizer},
      {"_fused_adamw_", check_fused_optimizer},
      {"_fused_rms_norm_backward", check_row_norm_backward},
      {"_fused_sgd", check_fused_optimizer},
      {"_fused_sgd_", check_fused_optimizer},
      {"_grid_sampler_2d_cpu_fallback_backward", check_grid_sampler_backward},
      {"_log_softmax_backward_data", check_softmax_backward},
      {"_logcumsumexp", check_logcumsumexp},
      {"_masked_softmax_backward", check_softmax_backward},
      {"_native_batch_norm_legit", check_batch_norm},
      {"_native_batch_norm_legit_functional", check_batch_norm},
      {"_native_batch_norm_legit_no_training", check_batch_norm_without_training},
      {"_pdist_backward", check_pdist},
      {"_pdist_forward", check_pdist},
      {"_segment_reduce_backward", check_segment_reduce},
      {"_sobol_engine_draw", check_sobol},
      {"_sobol_engine_ff_", check_sobol},
      {"_sobol_engine_initialize_state_", check_sobol},
      {"_sobol_engine_scramble_", check_sobol},
      {"_softmax_backward_data", check_softmax_backward},
      {"_stack", check_stack},
      {"_weight_norm_interface", check_weight_norm},
      {"_weight_norm_interface_backward", check_weight_norm},
      {"as_strided", check_as_strided},
      {"as_strided_", check_as_strided},
      {"as_strided_copy", check_as_strided},
      {"as_strided_scatter", check_as_strided},
      {"batch_norm_backward", check_unified_batch_norm_backward},
      {"batch_norm_backward_elemt", check_batch_norm_parts},
      {"batch_norm_backward_reduce", check_batch_norm_parts},
      {"batch_norm_elemt", check_batch_norm_parts},
      {"batch_norm_update_stats", check_batch_norm},
      {"chunk", check_section_count},
      {"cudnn_batch_norm", check_batch_norm},
      {"cudnn_batch_norm_backward", check_cudnn_batch_norm_backward},
      {"cudnn_grid_sampler_backward", check_grid_sampler_backward},
      {"dsplit", check_section_count},
      {"embedding_dense_backward", check_embedding_dense_backward},
      {"embedding_renorm", check_embedding_renorm},
      {"embedding_renorm_", check_embedding_renorm},
      {"grid_sampler_2d_backward", check_grid_sampler_backward},
      {"grid_sampler_3d_backward", check_grid_sampler_backward},
      {"hsplit", check_section_count},
      {"huber_loss_backward", check_floating_loss},
      {"kthvalue", check_median},
      {"linalg_ldl_solve", check_ldl_solve},
      {"linalg_lu_solve", check_linalg_lu_solve},
      {"linalg_matrix_power", check_matrix_power},
      {"lu_solve", check_lu_solve},
      {"lu_unpack", check_lu_unpack},
      {"median", check_median},
      {"mode", check_median},
      {"multi_margin_loss_backward", check_multi_margin_loss_backward},
      {"multilabel_margin_loss_backward", check_multilabel_margin_loss},
      {"multilabel_margin_loss_forward", check_multilabel_margin_loss},
      {"nanmedian", check_median},
      {"native_batch_norm", check_batch_norm},
      {"native_batch_norm_backward", check_native_batch_norm_backward},
      {"native_group_norm", check_group_norm},
      {"native_group_norm_backward", check_group_norm},
      {"native_layer_norm_backward", check_row_norm_backward},
      {"nll_loss2d_backward", check_nll_loss_backward},
      {"nll_loss_backward", check_nll_loss_backward},
      {"rrelu_with_noise", check_rrelu},
      {"rrelu_with_noise_", check_rrelu},
      {"rrelu_with_noise_functional", check_rrelu},
      {"segment_reduce", check_segment_reduce},
      {"smooth_l1_loss_backward", check_floating_loss},
      {"tensor_split", check_section_count},
      {"unsafe_chunk", check_section_count},
      {"vsplit", check_section_count},
  };
  auto found = checks->find(op_name);
  return found == checks->end() ? find_spatial_check(op_name) : found->second;
}

void check_arguments(ArgumentCheck check, const c10::FunctionSchema& schema,
                     std::vector<c10::IValue>& arguments) {
  OpArguments named(schema, arguments);
  check(named);
}

}  // namespace genie
