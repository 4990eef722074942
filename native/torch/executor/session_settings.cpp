#include "session_settings.h"

#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

namespace genie {

namespace {

using at::Float32Backend;
using at::Float32Op;

at::Float32Precision to_torch_precision(WireFloat32Precision precision) {
  switch (precision) {
    case WireFloat32Precision::Tf32:
      return at::Float32Precision::TF32;
    case WireFloat32Precision::Bf16:
      return at::Float32Precision::BF16;
    default:
      return at::Float32Precision::NONE;
  }
}

// The older settings come first: torch derives the newer ones from them, and some kernels check that both
// agree.
void apply_float32_precisions(const KernelSettings& kernels) {
  at::Context& context = at::globalContext();
  bool is_tf32 = kernels.cuda_matmul == WireFloat32Precision::Tf32 ||
                 kernels.mkldnn_matmul == WireFloat32Precision::Tf32;
  bool is_bf16 = kernels.mkldnn_matmul == WireFloat32Precision::Bf16;
  context.setFloat32MatmulPrecision(is_bf16 ? "medium" : is_tf32 ? "high" : "highest");
  context.setAllowTF32CuDNN(kernels.cuda_conv == WireFloat32Precision::Tf32);
  auto set = [&context](Float32Backend backend, Float32Op op, WireFloat32Precision precision) {
    context.setFloat32Precision(backend, op, to_torch_precision(precision));
  };
  set(Float32Backend::CUDA, Float32Op::CONV, kernels.cuda_conv);
  set(Float32Backend::CUDA, Float32Op::RNN, kernels.cuda_rnn);
  set(Float32Backend::CUDA, Float32Op::MATMUL, kernels.cuda_matmul);
  set(Float32Backend::MKLDNN, Float32Op::CONV, kernels.mkldnn_conv);
  set(Float32Backend::MKLDNN, Float32Op::RNN, kernels.mkldnn_rnn);
  set(Float32Backend::MKLDNN, Float32Op::MATMUL, kernels.mkldnn_matmul);
}

void apply_attention_settings(const KernelSettings& kernels) {
  at::Context& context = at::globalContext();
  context.setSDPUseFlash(kernels.flash_sdp);
  context.setSDPUseMemEfficient(kernels.memory_efficient_sdp);
  context.setSDPUseMath(kernels.math_sdp);
  context.setSDPUseCuDNN(kernels.cudnn_sdp);
  context.setAllowFP16BF16ReductionMathSDP(kernels.math_sdp_reduced_precision);
  context.setSDPPriorityOrder(
      std::vector<int64_t>(std::begin(kernels.sdp_priorities), std::end(kernels.sdp_priorities)));
}

// Older versions of torch have a flag instead of the option.
template <class Context>
void apply_reductions(Context& context, const KernelSettings& kernels) {
  bool fp16 = kernels.fp16_reduction == ReductionOption::Reduced;
  bool bf16 = kernels.bf16_reduction == ReductionOption::Reduced;
  if constexpr (requires { context.setAllowFP16ReductionCuBLAS(true, true); }) {
    context.setAllowFP16ReductionCuBLAS(fp16, kernels.fp16_reduction != ReductionOption::FullWithoutSplit);
    context.setAllowBF16ReductionCuBLAS(bf16, kernels.bf16_reduction != ReductionOption::FullWithoutSplit);
  } else {
    context.setAllowFP16ReductionCuBLAS(fp16);
    context.setAllowBF16ReductionCuBLAS(bf16);
  }
}

// Newer versions of torch only.
template <class Context>
void apply_cudnn_depthwise_kernel(Context& context, uint8_t kernel) {
  if constexpr (requires { context.cudnnDepthwiseKernel(); })
    context.setCuDNNDepthwiseKernel(static_cast<decltype(context.cudnnDepthwiseKernel())>(kernel));
}

// cuBLAS reads it at its first use; the first settings arrive before that.
void apply_cublas_workspace(CublasWorkspace workspace) {
  if (workspace == CublasWorkspace::Other) return;
  const char* config = CUBLAS_WORKSPACE_CONFIGS[static_cast<size_t>(workspace)];
  const char* current = std::getenv(CUBLAS_WORKSPACE_VARIABLE);
  if (!current || std::string(current) != config) ::setenv(CUBLAS_WORKSPACE_VARIABLE, config, 1);
}

void apply_kernel_settings(const KernelSettings& kernels) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(kernels.deterministic_algorithms, kernels.deterministic_warn_only);
  context.setDeterministicFillUninitializedMemory(kernels.deterministic_fill);
  apply_cublas_workspace(kernels.cublas_workspace);
  context.setUserEnabledCuDNN(kernels.cudnn_enabled);
  context.setBenchmarkCuDNN(kernels.cudnn_benchmark);
  context.setBenchmarkLimitCuDNN(kernels.cudnn_benchmark_limit);
  context.setDeterministicCuDNN(kernels.cudnn_deterministic);
  apply_cudnn_depthwise_kernel(context, kernels.cudnn_depthwise_kernel);
  context.setUserEnabledMkldnn(kernels.mkldnn_enabled);
  context.setDeterministicMkldnn(kernels.mkldnn_deterministic);
  apply_attention_settings(kernels);
  apply_reductions(context, kernels);
  context.setAllowFP16AccumulationCuBLAS(kernels.fp16_accumulation);
  apply_float32_precisions(kernels);
}

void apply_to_process(const Settings& settings) {
  c10::set_default_dtype(
      c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(settings.base.default_dtype)));
  at::Context::setFlushDenormal(settings.base.flushes_denormals);
  apply_kernel_settings(settings.kernels);
}

}  // namespace

Settings read_settings(WireReader& in) {
  auto settings = in.read_value<Settings>();
  if (const char* unsupported = find_unsupported_setting(settings))
    throw ProtocolError(std::string("a setting has an unknown value: ") + unsupported);
  return settings;
}

void SessionSettings::set(const Settings& settings) {
  current_ = settings;
  apply_temporarily(settings);
}

void SessionSettings::apply_temporarily(const Settings& settings) {
  if (applied_ && *applied_ == settings) return;
  applied_ = settings;
  apply_to_process(settings);
}

void SessionSettings::restore() {
  if (current_) apply_temporarily(*current_);
}

void SessionSettings::apply_to_thread() const {
  if (current_) at::Context::setFlushDenormal(current_->base.flushes_denormals);
}

}  // namespace genie
