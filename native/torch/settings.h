// The PyTorch settings of the client that affect the results of ops, as the record Settings of the op stream
// (wire.h). Both sides include this file. device/current_settings.h reads them, executor/session_settings.h
// applies them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/core/ScalarType.h>

#include "wire.h"

namespace genie {

// Settings that affect every op.
struct BaseSettings {
  uint8_t default_dtype = static_cast<uint8_t>(c10::ScalarType::Float);
  uint8_t flushes_denormals = 0;  // of the thread
};

// Full: as torch computes by default, and if it is set to IEEE.
enum class WireFloat32Precision : uint8_t { Full = 0, Tf32 = 1, Bf16 = 2 };
// Values of CUBLAS_WORKSPACE_CONFIG that make cuBLAS deterministic; others are not sent.
enum class CublasWorkspace : uint8_t { Other = 0, Large = 1, Small = 2 };
constexpr const char* CUBLAS_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG";
constexpr const char* CUBLAS_WORKSPACE_CONFIGS[] = {"", ":4096:8", ":16:8"};  // by CublasWorkspace
// Precision of the sums in half-precision matrix products, as at::CuBLASReductionOption.
enum class ReductionOption : uint8_t { Reduced = 0, Full = 1, FullWithoutSplit = 2 };
constexpr size_t SDP_PRIORITIES = 5;

// Settings that affect how an op is computed, unless it is elementwise or a view. Flags are 0 or 1.
struct KernelSettings {
  uint16_t cudnn_benchmark_limit;
  uint8_t deterministic_algorithms, deterministic_warn_only, deterministic_fill;
  CublasWorkspace cublas_workspace;
  uint8_t cudnn_enabled, cudnn_benchmark, cudnn_deterministic;
  uint8_t cudnn_depthwise_kernel;  // 0 to 2, as in torch
  uint8_t mkldnn_enabled, mkldnn_deterministic;
  uint8_t flash_sdp, memory_efficient_sdp, math_sdp, cudnn_sdp, math_sdp_reduced_precision;
  uint8_t sdp_priorities[SDP_PRIORITIES];  // values of at::SDPBackend, the preferred one first
  ReductionOption fp16_reduction, bf16_reduction;
  uint8_t fp16_accumulation;
  WireFloat32Precision cuda_conv, cuda_rnn, cuda_matmul;
  WireFloat32Precision mkldnn_conv, mkldnn_rnn, mkldnn_matmul;
  uint8_t reserved;
};

struct Settings {
  BaseSettings base;
  KernelSettings kernels;
};
static_assert(sizeof(BaseSettings) == 2 && sizeof(KernelSettings) == 32 && sizeof(Settings) == 34);
static_assert(std::has_unique_object_representations_v<Settings>);

inline bool operator==(const BaseSettings& left, const BaseSettings& right) {
  return std::memcmp(&left, &right, sizeof left) == 0;
}
inline bool operator==(const KernelSettings& left, const KernelSettings& right) {
  return std::memcmp(&left, &right, sizeof left) == 0;
}
inline bool operator==(const Settings& left, const Settings& right) {
  return left.base == right.base && left.kernels == right.kernels;
}

// Why an executor cannot apply the settings; null if it can.
inline const char* find_unsupported_setting(const Settings& settings) {
  auto dtype = static_cast<c10::ScalarType>(settings.base.default_dtype);
  if (!is_supported_dtype(dtype) || !c10::isFloatingType(dtype)) return "the default dtype";
  const KernelSettings& kernels = settings.kernels;
  const uint8_t flags[] = {settings.base.flushes_denormals,
                           kernels.deterministic_algorithms,
                           kernels.deterministic_warn_only,
                           kernels.deterministic_fill,
                           kernels.cudnn_enabled,
                           kernels.cudnn_benchmark,
                           kernels.cudnn_deterministic,
                           kernels.mkldnn_enabled,
                           kernels.mkldnn_deterministic,
                           kernels.flash_sdp,
                           kernels.memory_efficient_sdp,
                           kernels.math_sdp,
                           kernels.cudnn_sdp,
                           kernels.math_sdp_reduced_precision,
                           kernels.fp16_accumulation};
  for (uint8_t flag : flags)
    if (flag > 1) return "a flag";
  if (kernels.cublas_workspace > CublasWorkspace::Small) return "CUBLAS_WORKSPACE_CONFIG";
  if (kernels.cudnn_depthwise_kernel > 2) return "the depthwise kernel of cuDNN";
  for (uint8_t backend : kernels.sdp_priorities)
    if (backend >= SDP_PRIORITIES) return "the priority of attention backends";
  for (ReductionOption option : {kernels.fp16_reduction, kernels.bf16_reduction})
    if (option > ReductionOption::FullWithoutSplit) return "reduced-precision reductions";
  for (WireFloat32Precision precision : {kernels.cuda_conv, kernels.cuda_rnn, kernels.cuda_matmul})
    if (precision > WireFloat32Precision::Tf32) return "the float32 precision of CUDA";
  for (WireFloat32Precision precision : {kernels.mkldnn_conv, kernels.mkldnn_rnn, kernels.mkldnn_matmul})
    if (precision > WireFloat32Precision::Bf16) return "the float32 precision of oneDNN";
  return nullptr;
}

}  // namespace genie
