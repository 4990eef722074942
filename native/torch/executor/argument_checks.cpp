#include "argument_checks.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/ExpandUtils.h>

#include "failure.h"
#include "op_arguments.h"

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

// --- pooling and padding ------------------------------------------------------------------------

// The gradient must have the dimensions of the input, and the same sizes in those before the last `spatial`.
void check_same_planes(OpArguments& args, const Tensor& input, int64_t spatial) {
  const Tensor& grad = args.tensor("grad_output");
  args.require(input.dim() > spatial && input.dim() <= spatial + 2 && grad.dim() == input.dim() &&
                   grad.sizes().slice(0, static_cast<size_t>(grad.dim() - spatial)) ==
                       input.sizes().slice(0, static_cast<size_t>(input.dim() - spatial)),
               "grad_output and self differ in batch or channels");
}

int64_t plane_elements(const Tensor& input, int64_t spatial) {
  return c10::multiply_integers(input.sizes().slice(static_cast<size_t>(input.dim() - spatial)));
}

// `no_index` is the lowest index that the kernels accept: -1 if that means none.
void check_max_pool_backward(OpArguments& args, int64_t spatial, int64_t no_index) {
  const Tensor& input = args.tensor("self");
  check_same_planes(args, input, spatial);
  args.require_sizes("indices", args.tensor("grad_output").sizes());
  args.make_dense({"indices"});
  args.bound_indices("indices", no_index, plane_elements(input, spatial));
}

void check_max_pool2d_backward(OpArguments& args) {
  // On CUDA, this kernel compares indices instead of following them. Compiled code checks them.
  const Tensor& input = args.tensor("self");
  if (input.is_cpu()) return check_max_pool_backward(args, 2, -1);
  check_same_planes(args, input, 2);
  args.require_sizes("indices", args.tensor("grad_output").sizes());
}

void check_max_pool3d_backward(OpArguments& args) { check_max_pool_backward(args, 3, -1); }
void check_max_pool2d_backward_with_any_window(OpArguments& args) { check_max_pool_backward(args, 2, 0); }
void check_max_pool3d_backward_with_any_window(OpArguments& args) { check_max_pool_backward(args, 3, 0); }

void check_avg_pool2d_backward(OpArguments& args) { check_same_planes(args, args.tensor("self"), 2); }

void check_avg_pool3d_backward(OpArguments& args) { check_same_planes(args, args.tensor("self"), 3); }

void check_pad_backward(OpArguments& args, int64_t spatial) {
  const Tensor& input = args.tensor("self");
  const Tensor& grad = args.tensor("grad_output");
  auto padding = args.integers("padding");
  args.require(padding.size() == static_cast<size_t>(2 * spatial),
               "padding must have " + std::to_string(2 * spatial) + " numbers");
  check_same_planes(args, input, spatial);
  for (int64_t i = 1; i <= spatial; i++) {
    auto before = static_cast<size_t>(2 * (i - 1));
    __int128 expected = static_cast<__int128>(input.size(-i)) + padding[before] + padding[before + 1];
    args.require(expected == grad.size(-i), "grad_output does not have the padded size of self");
  }
}

void check_pad1d_backward(OpArguments& args) { check_pad_backward(args, 1); }
void check_pad2d_backward(OpArguments& args) { check_pad_backward(args, 2); }
void check_pad3d_backward(OpArguments& args) { check_pad_backward(args, 3); }

void check_unfold_backward(OpArguments& args) {
  const Tensor& grad = args.tensor("grad_in");
  auto sizes = args.integers("input_sizes");
  auto dimensions = static_cast<int64_t>(sizes.size());
  int64_t dim = args.integer("dim"), size = args.integer("size"), step = args.integer("step");
  if (dimensions == 0) return args.require(grad.dim() == 1 && grad.numel() <= 1, "grad_in has a wrong shape");
  args.require(dim >= -dimensions && dim < dimensions && step > 0, "dim or step is out of range");
  auto at = static_cast<size_t>(dim < 0 ? dim + dimensions : dim);
  args.require(size >= 0 && size <= sizes[at], "size is out of range");
  sizes[at] = (sizes[at] - size) / step + 1;
  sizes.push_back(size);
  args.require_sizes("grad_in", sizes);
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
  args.require_ascending_on_cpu("offsets");
}

void check_embedding_bag_dense_backward(OpArguments& args) {
  constexpr int64_t MODE_MAX = 2;
  const Tensor& grad = args.tensor("grad");
  args.require(grad.dim() == 2, "grad must have 2 dimensions");
  int64_t bags = grad.size(0), weights = args.integer("num_weights");
  args.require_count("offset2bag", args.tensor("indices").numel());
  args.require(args.tensor("bag_size").numel() >= bags, "bag_size is smaller than the number of bags");
  check_per_sample_weights(args);
  args.make_dense({"indices", "offset2bag", "bag_size", "maximum_indices", "per_sample_weights"});
  args.bound_indices("indices", 0, weights);
  args.bound_indices("offset2bag", 0, bags);
  if (args.integer("mode") != MODE_MAX) return;
  args.require_sizes("maximum_indices", grad.sizes());
  args.bound_indices("maximum_indices", -1, weights);
}

void check_embedding_bag_weights_backward(OpArguments& args) {
  const Tensor& grad = args.tensor("grad");
  const Tensor& weight = args.tensor("weight");
  const Tensor& offsets = args.tensor("offsets");
  args.require(grad.dim() == 2 && weight.dim() == 2 && grad.size(1) == weight.size(1),
               "grad and weight must have 2 dimensions and equal columns");
  int64_t bags = grad.size(0), indices = args.tensor("indices").numel();
  args.make_dense({"indices", "offsets", "offset2bag"});
  args.bound_indices("indices", 0, weight.size(0));
  if (args.tensor("offset2bag").numel() == 0 && grad.is_cpu()) {
    // The kernel computes it.
    auto begins = args.host_integers(offsets);
    bool last_is_end = static_cast<int64_t>(begins.size()) == bags + 1 && begins.back() == indices;
    args.require(offsets.dim() == 1 && std::is_sorted(begins.begin(), begins.end()) &&
                     (begins.empty() || (begins.front() == 0 && begins.back() <= indices)) &&
                     (last_is_end || static_cast<int64_t>(begins.size()) <= bags) &&
                     (indices == 0 || !begins.empty()),
                 "offsets do not divide indices into the bags of grad");
    return;
  }
  args.require_count("offset2bag", indices);
  args.bound_indices("offset2bag", 0, bags);
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
  args.require(input.dim() == 2 && input.size(0) > 0, "self must have 2 dimensions, and rows");
  if (!args.has_argument("grad")) return;
  auto rows = static_cast<__int128>(input.size(0));
  auto pairs = static_cast<int64_t>(rows * (rows - 1) / 2);
  args.require_count("grad", pairs);
  args.require_count("pdist", pairs);
}

// --- convolutions, attention --------------------------------------------------------------------

void check_convolution(OpArguments& args) {
  auto kernel = args.integers("kernel_size");
  const Tensor& weight = args.tensor("weight");
  auto spatial = kernel.size();
  args.require(
      static_cast<size_t>(weight.dim()) == spatial + 2 && weight.sizes().slice(2) == IntArrayRef(kernel),
      "kernel_size is not that of weight");
  for (const char* name : {"stride", "padding", "dilation", "output_padding"}) {
    if (!args.has_argument(name)) continue;
    args.require(args.integers(name).size() == spatial,
                 std::string(name) + " must have a number per dimension");
    for (int64_t number : args.integers(name))  // kernels compute with 32 bits
      args.require(number >= 0 && number <= INT32_MAX, std::string(name) + " is out of range");
  }
}

void check_attention_mask(OpArguments& args, const char* name, IntArrayRef scores) {
  const Tensor* mask = args.find_tensor(name);
  if (!mask) return;
  args.require(static_cast<size_t>(mask->dim()) <= scores.size(),
               std::string(name) + " has too many dimensions");
  for (int64_t i = 1; i <= mask->dim(); i++) {
    int64_t expected = scores[scores.size() - static_cast<size_t>(i)];
    args.require(mask->size(-i) == expected || mask->size(-i) == 1,
                 std::string(name) + " does not have the shape of the scores");
  }
}

// Whether key and value fit to the query, apart from the number of features of the value.
bool have_attention_shapes(const Tensor& query, const Tensor& key, const Tensor& value, int64_t heads,
                           int64_t sequence) {
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && key.size(0) == query.size(0) &&
         value.size(0) == query.size(0) && key.size(heads) == value.size(heads) && key.size(heads) > 0 &&
         query.size(heads) % key.size(heads) == 0 && key.size(sequence) == value.size(sequence) &&
         key.size(3) == query.size(3);
}

// Of the arguments of a backward op. There is one logarithm for each row of each head, and some may be
// padded.
void check_attention_gradient(OpArguments& args, const char* grad) {
  const Tensor &query = args.tensor("query"), &value = args.tensor("value");
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  args.require_sizes(grad, sizes);
  args.require_sizes("out", sizes);
  int64_t rows = query.size(-1) ? query.numel() / query.size(-1) : 0;
  args.require(args.tensor("logsumexp").numel() >= rows, "logsumexp is too small");
}

// Batch x heads x sequence x features.
void check_attention(OpArguments& args) {
  const Tensor &query = args.tensor("query"), &key = args.tensor("key"), &value = args.tensor("value");
  args.require(have_attention_shapes(query, key, value, 1, 2),
               "the shapes of query, key and value do not match");
  for (const char* mask : {"attn_mask", "attn_bias"})
    check_attention_mask(args, mask, {query.size(0), query.size(1), query.size(2), key.size(2)});
  for (const char* name : {"cum_seq_q", "cum_seq_k"})
    args.require(!args.find_tensor(name), std::string(name) + " is not supported");
  if (args.has_argument("logsumexp"))
    check_attention_gradient(args, args.has_argument("grad_out_") ? "grad_out_" : "grad_out");
}

// These kernels check less than those for CUDA.
void check_attention_on_cpu(OpArguments& args) {
  check_attention(args);
  for (const char* name : {"query", "key", "value", "grad_out", "out"}) {
    const Tensor* tensor = args.find_tensor(name);
    args.require(!tensor || tensor->stride(-1) == 1 || tensor->size(-1) <= 1,
                 std::string(name) + " must be contiguous in its last dimension");
  }
  args.require(args.tensor("value").size(3) == args.tensor("query").size(3),
               "value has other features than query");
}

// The begin of each sequence of a batch, and the end of the last.
size_t count_sequences(OpArguments& args, const char* name, const Tensor& rows, int64_t longest) {
  auto begins = args.host_integers(name);
  args.require(rows.dim() >= 3 && !begins.empty() && begins.front() >= 0 && begins.back() <= rows.size(-3) &&
                   std::is_sorted(begins.begin(), begins.end()),
               std::string(name) + " does not divide its tensor into sequences");
  for (size_t i = 1; i < begins.size(); i++)
    args.require(begins[i] - begins[i - 1] <= longest,
                 std::string(name) + " has a sequence over the maximum");
  return begins.size();
}

// Batch x sequence x heads x features, or sequences one after the other. Checking the latter waits for the
// accelerator; no kernel does.
void check_attention_of_sequences(OpArguments& args) {
  for (const char* name : {"seqused_k", "seqlen_k", "block_table"})
    args.require(!args.find_tensor(name), std::string(name) + " is not supported");
  const Tensor &query = args.tensor("query"), &key = args.tensor("key"), &value = args.tensor("value");
  bool efficient = args.has_argument("cu_seqlens_q");
  const char* of_query = efficient ? "cu_seqlens_q" : "cum_seq_q";
  const char* of_key = efficient ? "cu_seqlens_k" : "cum_seq_k";
  bool has_sequences = args.find_tensor(of_query) && args.tensor(of_query).numel();
  args.require(has_sequences == (args.find_tensor(of_key) && args.tensor(of_key).numel()),
               std::string(of_query) + " and " + of_key + " require each other");
  if (has_sequences) {
    int64_t longest_query = args.integer_or(efficient ? "max_seqlen_q" : "max_q", 0);
    int64_t longest_key = args.integer_or(efficient ? "max_seqlen_k" : "max_k", INT32_MAX);
    args.require(key.dim() >= 3 && value.sizes().slice(0, static_cast<size_t>(value.dim() - 1)) ==
                                       key.sizes().slice(0, static_cast<size_t>(key.dim() - 1)),
                 "key and value differ in shape");
    args.require(count_sequences(args, of_query, query, longest_query) ==
                     count_sequences(args, of_key, key, longest_key),
                 "query and key differ in the number of sequences");
  } else {
    args.require(have_attention_shapes(query, key, value, 2, 1),
                 "the shapes of query, key and value do not match");
  }
  if (args.has_argument("logsumexp"))
    check_attention_gradient(args, args.has_argument("grad_out_") ? "grad_out_" : "grad_out");
}

void check_grouped_product(OpArguments& args) {
  const Tensor &one = args.tensor("self"), &other = args.tensor("mat2");
  args.require(one.dim() >= 2 && other.dim() >= 2, "self and mat2 must have 2 or 3 dimensions");
  if (!args.find_tensor("offs")) return;
  int64_t limit = one.dim() == 3 ? other.size(-1) : other.dim() == 3 ? one.size(0) : one.size(1);
  args.bound_indices("offs", 0, limit + 1);
}

// --- others -------------------------------------------------------------------------------------

void check_fft(OpArguments& args) {
  int64_t dimensions = args.tensor("self").dim();
  std::vector<bool> seen(static_cast<size_t>(dimensions));
  for (int64_t dim : args.integers("dim")) {
    args.require(dim >= -dimensions && dim < dimensions, "dim is out of range");
    auto at = static_cast<size_t>(dim < 0 ? dim + dimensions : dim);
    args.require(!seen[at], "dim contains a dimension twice");
    seen[at] = true;
  }
}

void check_cumulative(OpArguments& args) {
  for (const char* name : {"values", "indices"}) args.require_sizes(name, args.tensor("self").sizes());
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
      {"_adaptive_avg_pool2d_backward", check_avg_pool2d_backward},
      {"_adaptive_avg_pool3d_backward", check_avg_pool3d_backward},
      {"_batch_norm_no_update", check_batch_norm_without_training},
      {"_batch_norm_with_update", check_batch_norm},
      {"_batch_norm_with_update_functional", check_batch_norm},
      {"_cdist_backward", check_cdist_backward},
      {"_ctc_loss", check_ctc_loss},
      {"_ctc_loss_backward", check_ctc_loss},
      {"_cudnn_attention_backward", check_attention},
      {"_cudnn_ctc_loss", check_ctc_loss},
      {"_cummax_helper", check_cumulative},
      {"_cummin_helper", check_cumulative},
      {"_efficient_attention_backward", check_attention_of_sequences},
      {"_efficient_attention_forward", check_attention_of_sequences},
      {"_embedding_bag", check_embedding_bag},
      {"_embedding_bag_dense_backward", check_embedding_bag_dense_backward},
      {"_embedding_bag_forward_only", check_embedding_bag},
      {"_embedding_bag_per_sample_weights_backward", check_embedding_bag_weights_backward},
      {"_fft_c2c", check_fft},
      {"_fft_c2r", check_fft},
      {"_fft_r2c", check_fft},
      {"_flash_attention_backward", check_attention_of_sequences},
      {"_flash_attention_forward", check_attention_of_sequences},
      {"_flash_attention_forward_no_dropout_inplace", check_attention_of_sequences},
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
      {"_grouped_mm", check_grouped_product},
      {"_log_softmax_backward_data", check_softmax_backward},
      {"_masked_softmax_backward", check_softmax_backward},
      {"_native_batch_norm_legit", check_batch_norm},
      {"_native_batch_norm_legit_functional", check_batch_norm},
      {"_native_batch_norm_legit_no_training", check_batch_norm_without_training},
      {"_pdist_backward", check_pdist},
      {"_pdist_forward", check_pdist},
      {"_scaled_dot_product_cudnn_attention_backward", check_attention},
      {"_scaled_dot_product_efficient_attention_backward", check_attention},
      {"_scaled_dot_product_flash_attention_backward", check_attention},
      {"_scaled_dot_product_flash_attention_for_cpu", check_attention_on_cpu},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", check_attention_on_cpu},
      {"_scaled_dot_product_fused_attention_overrideable_backward", check_attention},
      {"_scaled_grouped_mm", check_grouped_product},
      {"_segment_reduce_backward", check_segment_reduce},
      {"_slow_conv2d_backward", check_convolution},
      {"_slow_conv2d_forward", check_convolution},
      {"_softmax_backward_data", check_softmax_backward},
      {"_stack", check_stack},
      {"_weight_norm_interface", check_weight_norm},
      {"_weight_norm_interface_backward", check_weight_norm},
      {"adaptive_avg_pool3d_backward", check_avg_pool3d_backward},
      {"adaptive_max_pool2d_backward", check_max_pool2d_backward_with_any_window},
      {"adaptive_max_pool3d_backward", check_max_pool3d_backward_with_any_window},
      {"avg_pool2d_backward", check_avg_pool2d_backward},
      {"avg_pool3d_backward", check_avg_pool3d_backward},
      {"batch_norm_backward", check_unified_batch_norm_backward},
      {"batch_norm_backward_elemt", check_batch_norm_parts},
      {"batch_norm_backward_reduce", check_batch_norm_parts},
      {"batch_norm_elemt", check_batch_norm_parts},
      {"batch_norm_update_stats", check_batch_norm},
      {"cudnn_batch_norm", check_batch_norm},
      {"cudnn_batch_norm_backward", check_cudnn_batch_norm_backward},
      {"cudnn_grid_sampler_backward", check_grid_sampler_backward},
      {"embedding_dense_backward", check_embedding_dense_backward},
      {"embedding_renorm", check_embedding_renorm},
      {"embedding_renorm_", check_embedding_renorm},
      {"fractional_max_pool2d_backward", check_max_pool2d_backward_with_any_window},
      {"fractional_max_pool3d_backward", check_max_pool3d_backward_with_any_window},
      {"grid_sampler_2d_backward", check_grid_sampler_backward},
      {"grid_sampler_3d_backward", check_grid_sampler_backward},
      {"max_pool2d_with_indices_backward", check_max_pool2d_backward},
      {"max_pool3d_with_indices_backward", check_max_pool3d_backward},
      {"multi_margin_loss_backward", check_multi_margin_loss_backward},
      {"multilabel_margin_loss_backward", check_multilabel_margin_loss},
      {"multilabel_margin_loss_forward", check_multilabel_margin_loss},
      {"native_batch_norm", check_batch_norm},
      {"native_batch_norm_backward", check_native_batch_norm_backward},
      {"native_group_norm", check_group_norm},
      {"native_group_norm_backward", check_group_norm},
      {"native_layer_norm_backward", check_row_norm_backward},
      {"nll_loss2d_backward", check_nll_loss_backward},
      {"nll_loss_backward", check_nll_loss_backward},
      {"reflection_pad1d_backward", check_pad1d_backward},
      {"reflection_pad2d_backward", check_pad2d_backward},
      {"reflection_pad3d_backward", check_pad3d_backward},
      {"replication_pad1d_backward", check_pad1d_backward},
      {"replication_pad2d_backward", check_pad2d_backward},
      {"replication_pad3d_backward", check_pad3d_backward},
      {"rrelu_with_noise", check_rrelu},
      {"rrelu_with_noise_", check_rrelu},
      {"rrelu_with_noise_functional", check_rrelu},
      {"segment_reduce", check_segment_reduce},
      {"slow_conv3d", check_convolution},
      {"slow_conv3d_forward", check_convolution},
      {"slow_conv_dilated2d", check_convolution},
      {"slow_conv_dilated3d", check_convolution},
      {"slow_conv_transpose2d", check_convolution},
      {"slow_conv_transpose3d", check_convolution},
      {"unfold_backward", check_unfold_backward},
  };
  auto found = checks->find(op_name);
  return found == checks->end() ? nullptr : found->second;
}

void check_arguments(ArgumentCheck check, const c10::FunctionSchema& schema,
                     std::vector<c10::IValue>& arguments) {
  OpArguments named(schema, arguments);
  check(named);
}

}  // namespace genie
