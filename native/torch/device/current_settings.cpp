// See current_settings.h.
#include "current_settings.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "errors.h"

namespace genie {

namespace {

using at::Float32Backend;
using at::Float32Op;

// torch has a setter only.
bool flushes_denormals() {
#if defined(__x86_64__)
  constexpr unsigned FLUSH_TO_ZERO = 1u << 15, DENORMALS_ARE_ZERO = 1u << 6;
  return (_mm_getcsr() & (FLUSH_TO_ZERO | DENORMALS_ARE_ZERO)) != 0;
#elif defined(__aarch64__)
  constexpr uint64_t FLUSH_TO_ZERO = uint64_t{1} << 24;
  uint64_t control;
  __asm__ __volatile__("mrs %0, fpcr" : "=r"(control));
  return (control & FLUSH_TO_ZERO) != 0;
#else
  return false;
#endif
}

WireFloat32Precision float32_precision(Float32Backend backend, Float32Op op) {
  switch (at::globalContext().float32Precision(backend, op)) {
    case at::Float32Precision::TF32:
      return WireFloat32Precision::Tf32;
    case at::Float32Precision::BF16:
      return WireFloat32Precision::Bf16;
    default:
      return WireFloat32Precision::Full;
  }
}

void read_cuda_precisions(KernelSettings& now) {
  now.cuda_conv = float32_precision(Float32Backend::CUDA, Float32Op::CONV);
  now.cuda_rnn = float32_precision(Float32Backend::CUDA, Float32Op::RNN);
  now.cuda_matmul = float32_precision(Float32Backend::CUDA, Float32Op::MATMUL);
}

void read_mkldnn_precisions(KernelSettings& now) {
  now.mkldnn_conv = float32_precision(Float32Backend::MKLDNN, Float32Op::CONV);
  now.mkldnn_rnn = float32_precision(Float32Backend::MKLDNN, Float32Op::RNN);
  now.mkldnn_matmul = float32_precision(Float32Backend::MKLDNN, Float32Op::MATMUL);
}

// Like cuBLAS, reads the variable once.
CublasWorkspace cublas_workspace() {
  static const CublasWorkspace found = [] {
    const char* value = std::getenv(CUBLAS_WORKSPACE_VARIABLE);
    for (auto each : {CublasWorkspace::Large, CublasWorkspace::Small})
      if (value && std::string(value) == CUBLAS_WORKSPACE_CONFIGS[static_cast<size_t>(each)]) return each;
    return CublasWorkspace::Other;
  }();
  return found;
}

// Newer versions of torch only.
template <class Context>
uint8_t cudnn_depthwise_kernel(const Context& context) {
  if constexpr (requires { context.cudnnDepthwiseKernel(); })
    return static_cast<uint8_t>(context.cudnnDepthwiseKernel());
  return 0;
}

// Older versions of torch have a flag instead of the option.
template <class Option>
ReductionOption reduction_option(Option option) {
  if constexpr (std::is_same_v<Option, bool>)
    return option ? ReductionOption::Reduced : ReductionOption::Full;
  return static_cast<ReductionOption>(option);
}

void read_sdp_priorities(at::Context& context, uint8_t (&priorities)[SDP_PRIORITIES]) {
  auto order = context.sDPPriorityOrder();
  static_assert(std::tuple_size_v<decltype(order)> == SDP_PRIORITIES);
  for (size_t i = 0; i < SDP_PRIORITIES; i++) priorities[i] = static_cast<uint8_t>(order[i]);
}

}  // namespace

BaseSettings current_base_settings() {
  return {static_cast<uint8_t>(c10::get_default_dtype_as_scalartype()), flushes_denormals()};
}

KernelSettings current_kernel_settings(PrecisionsOf accelerators) {
  at::Context& context = at::globalContext();
  KernelSettings now{};
  now.cudnn_benchmark_limit =
      static_cast<uint16_t>(std::clamp(context.benchmarkLimitCuDNN(), 0, static_cast<int>(UINT16_MAX)));
  now.deterministic_algorithms = context.deterministicAlgorithms();
  now.deterministic_warn_only = context.deterministicAlgorithmsWarnOnly();
  now.deterministic_fill = context.deterministicFillUninitializedMemory();
  now.cublas_workspace = cublas_workspace();
  now.cudnn_enabled = context.userEnabledCuDNN();
  now.cudnn_benchmark = context.benchmarkCuDNN();
  now.cudnn_deterministic = context.deterministicCuDNN();
  now.cudnn_depthwise_kernel = cudnn_depthwise_kernel(context);
  now.mkldnn_enabled = context.userEnabledMkldnn();
  now.mkldnn_deterministic = context.deterministicMkldnn();
  now.flash_sdp = context.userEnabledFlashSDP();
  now.memory_efficient_sdp = context.userEnabledMemEfficientSDP();
  now.math_sdp = context.userEnabledMathSDP();
  now.cudnn_sdp = context.userEnabledCuDNNSDP();
  now.math_sdp_reduced_precision = context.allowFP16BF16ReductionMathSDP();
  read_sdp_priorities(context, now.sdp_priorities);
  now.fp16_reduction = reduction_option(context.allowFP16ReductionCuBLAS());
  now.bf16_reduction = reduction_option(context.allowBF16ReductionCuBLAS());
  now.fp16_accumulation = context.allowFP16AccumulationCuBLAS();
  if (accelerators != PrecisionsOf::Cpu) read_cuda_precisions(now);
  if (accelerators != PrecisionsOf::Gpu) read_mkldnn_precisions(now);
  return now;
}

void check_settings_supported(const Settings& settings) {
  const char* unsupported = find_unsupported_setting(settings);
  if (!unsupported) return;
  raise_python_error(
      "device.op_refused",
      std::string("executors do not support this process's value of a PyTorch setting: ") + unsupported);
}

}  // namespace genie
