// Autocast for the device: the same ops in lower precision and in float32 as on CUDA.
#include <ATen/autocast_mode.h>
#include <ATen/ops/_cudnn_rnn_ops.h>
#include <ATen/ops/mkldnn_rnn_layer_ops.h>
#include <torch/library.h>

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(IN_FLOAT32)
#define RESULT_IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(RESULT_IN_FLOAT32)
#define WIDEST_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST_TYPE)
  LOWER_PRECISION(_cudnn_rnn)
  LOWER_PRECISION(mkldnn_rnn_layer)
}
