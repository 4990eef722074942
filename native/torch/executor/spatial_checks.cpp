#include "spatial_checks.h"

#include <algorithm>
#include <initializer_list>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include "op_arguments.h"

namespace genie {

namespace {

using at::Tensor;
using c10::IntArrayRef;

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
  if (args.has_argument("output_size")) {
    auto sizes = args.tensor("grad_output").sizes();
    args.require(sizes.slice(sizes.size() - static_cast<size_t>(spatial)) ==
                         IntArrayRef(args.integers("output_size")) &&
                     args.integers("kernel_size").size() == static_cast<size_t>(spatial),
                 "output_size is not that of grad_output");
  }
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

void check_avg_pool_backward(OpArguments& args, int64_t spatial) {
  const Tensor& input = args.tensor("self");
  check_same_planes(args, input, spatial);
  args.require(input.numel() > 0 || args.tensor("grad_output").numel() == 0, "self is empty");
}

void check_avg_pool2d_backward(OpArguments& args) { check_avg_pool_backward(args, 2); }
void check_avg_pool3d_backward(OpArguments& args) { check_avg_pool_backward(args, 3); }

// If a scale is given, kernels compute source positions from it instead of from the sizes.
void check_upsample(OpArguments& args) {
  if (!args.has_argument("output_size")) return;
  auto outputs = args.integers("output_size");
  auto inputs =
      args.has_argument("input_size") ? args.integers("input_size") : args.tensor("self").sizes().vec();
  args.require(inputs.size() == outputs.size() + 2, "output_size does not match the dimensions of the input");
  const char* names[] = {"scales_d", "scales_h", "scales_w"};
  for (size_t i = 0; i < outputs.size(); i++) {
    const char* name = outputs.size() == 1 ? "scales" : names[i + 3 - outputs.size()];
    auto scale = args.try_float(name);
    if (!scale) continue;
    args.require(*scale > 0 && static_cast<double>(outputs[i]) <= static_cast<double>(inputs[i + 2]) * *scale,
                 std::string(name) + " and output_size do not match");
  }
}

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

// --- convolutions, attention --------------------------------------------------------------------

void check_convolution(OpArguments& args) {
  auto kernel = args.integers("kernel_size");
  const Tensor& weight = args.tensor("weight");
  auto spatial = kernel.size();
  args.require(
      static_cast<size_t>(weight.dim()) == spatial + 2 && weight.sizes().slice(2) == IntArrayRef(kernel),
      "kernel_size is not that of weight");
  if (args.has_argument("grad_output")) {
    const Tensor &grad = args.tensor("grad_output"), &input = args.tensor("self");
    args.require(grad.dim() == input.dim() && grad.dim() > 2 && grad.size(0) == input.size(0),
                 "grad_output and self differ in dimensions or batch");
  }
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
  if (!args.has_argument("logsumexp")) return;
  check_attention_gradient(args, args.has_argument("grad_out_") ? "grad_out_" : "grad_out");
  const Tensor& logarithms = args.tensor("logsumexp");
  args.require(logarithms.dim() >= 3 && logarithms.size(0) == query.size(0) &&
                   logarithms.size(1) == query.size(1) && logarithms.size(2) >= query.size(2),
               "logsumexp does not have a number for each row of each head");
}

// These kernels check less than those for CUDA.
void check_attention_on_cpu(OpArguments& args) {
  check_attention(args);
  // grad_out may be expanded: the kernel copies it.
  for (const char* name : {"query", "key", "value", "out"}) {
    const Tensor* tensor = args.find_tensor(name);
    args.require(!tensor || tensor->stride(-1) == 1 || tensor->size(-1) <= 1,
                 std::string(name) + " must be contiguous in its last dimension");
  }
  const Tensor &query = args.tensor("query"), &key = args.tensor("key"), &value = args.tensor("value");
  args.require(value.size(3) == query.size(3), "value has other features than query");
  args.require(query.numel() > 0 && key.numel() > 0, "query and key must not be empty");
}

// Divides the heads of the query by those of key and value.
void check_attention_heads(OpArguments& args) {
  for (const char* name : {"key", "value"}) {
    const Tensor& tensor = args.tensor(name);
    args.require(tensor.dim() < 3 || tensor.size(-3) > 0, std::string(name) + " has no heads");
  }
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

}  // namespace

ArgumentCheck find_spatial_check(const std::string& op_name) {
  static const auto* checks = new std::unordered_map<std::string, ArgumentCheck>{
      {"_adaptive_avg_pool2d_backward", check_avg_pool2d_backward},
      {"_adaptive_avg_pool3d_backward", check_avg_pool3d_backward},
      {"_cudnn_attention_backward", check_attention},
      {"_efficient_attention_backward", check_attention_of_sequences},
      {"_efficient_attention_forward", check_attention_of_sequences},
      {"_flash_attention_backward", check_attention_of_sequences},
      {"_flash_attention_forward", check_attention_of_sequences},
      {"_flash_attention_forward_no_dropout_inplace", check_attention_of_sequences},
      {"_grouped_mm", check_grouped_product},
      {"_scaled_dot_product_cudnn_attention_backward", check_attention},
      {"_scaled_dot_product_efficient_attention_backward", check_attention},
      {"_scaled_dot_product_flash_attention_backward", check_attention},
      {"_scaled_dot_product_flash_attention_for_cpu", check_attention_on_cpu},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", check_attention_on_cpu},
      {"_scaled_dot_product_fused_attention_overrideable_backward", check_attention},
      {"_scaled_grouped_mm", check_grouped_product},
      {"_slow_conv2d_backward", check_convolution},
      {"_slow_conv2d_forward", check_convolution},
      {"_upsample_bicubic2d_aa", check_upsample},
      {"_upsample_bicubic2d_aa_backward", check_upsample},
      {"_upsample_bilinear2d_aa", check_upsample},
      {"_upsample_bilinear2d_aa_backward", check_upsample},
      {"_upsample_lanczos2d_aa", check_upsample},
      {"_upsample_lanczos2d_aa_backward", check_upsample},
      {"_upsample_nearest_exact1d", check_upsample},
      {"_upsample_nearest_exact1d_backward", check_upsample},
      {"_upsample_nearest_exact2d", check_upsample},
      {"_upsample_nearest_exact2d_backward", check_upsample},
      {"_upsample_nearest_exact3d", check_upsample},
      {"_upsample_nearest_exact3d_backward", check_upsample},
      {"adaptive_avg_pool3d_backward", check_avg_pool3d_backward},
      {"adaptive_max_pool2d_backward", check_max_pool2d_backward_with_any_window},
      {"adaptive_max_pool3d_backward", check_max_pool3d_backward_with_any_window},
      {"avg_pool2d_backward", check_avg_pool2d_backward},
      {"avg_pool3d_backward", check_avg_pool3d_backward},
      {"fractional_max_pool2d_backward", check_max_pool2d_backward_with_any_window},
      {"fractional_max_pool3d_backward", check_max_pool3d_backward_with_any_window},
      {"max_pool2d_with_indices_backward", check_max_pool2d_backward},
      {"max_pool3d_with_indices_backward", check_max_pool3d_backward},
      {"reflection_pad1d_backward", check_pad1d_backward},
      {"reflection_pad2d_backward", check_pad2d_backward},
      {"reflection_pad3d_backward", check_pad3d_backward},
      {"replication_pad1d_backward", check_pad1d_backward},
      {"replication_pad2d_backward", check_pad2d_backward},
      {"replication_pad3d_backward", check_pad3d_backward},
      {"scaled_dot_product_attention", check_attention_heads},
      {"slow_conv3d", check_convolution},
      {"slow_conv3d_forward", check_convolution},
      {"slow_conv_dilated2d", check_convolution},
      {"slow_conv_dilated3d", check_convolution},
      {"slow_conv_transpose2d", check_convolution},
      {"slow_conv_transpose3d", check_convolution},
      {"unfold_backward", check_unfold_backward},
      {"upsample_bicubic2d", check_upsample},
      {"upsample_bicubic2d_backward", check_upsample},
      {"upsample_bilinear2d", check_upsample},
      {"upsample_bilinear2d_backward", check_upsample},
      {"upsample_linear1d", check_upsample},
      {"upsample_linear1d_backward", check_upsample},
      {"upsample_nearest1d", check_upsample},
      {"upsample_nearest1d_backward", check_upsample},
      {"upsample_nearest2d", check_upsample},
      {"upsample_nearest2d_backward", check_upsample},
      {"upsample_nearest3d", check_upsample},
      {"upsample_nearest3d_backward", check_upsample},
      {"upsample_trilinear3d", check_upsample},
      {"upsample_trilinear3d_backward", check_upsample},
  };
  auto found = checks->find(op_name);
  return found == checks->end() ? nullptr : found->second;
}

}  // namespace genie
