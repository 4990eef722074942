// What the client knows about ops that neither their schemas nor their tags say: a reviewed table.
#pragma once

#include <cstdint>
#include <string>

namespace genie {

// Bits of a row.
enum OpPolicy : uint8_t {
  // Numbers among the arguments determine the shape of an output, so they are part of the template's key.
  SHAPE_FROM_NUMBERS = 1,
  // The meta kernel differs from the kernels of accelerators in shapes, strides or optional outputs, or
  // depends
  // on the accelerator: the executor reports the outputs.
  EXECUTOR_INFERS = 2,
  // Accepts CPU tensors as indices, as on CUDA.
  CPU_INDICES = 4,
  // torch composes it of other ops, which the client sends, or runs it in the client.
  DECOMPOSED = 8,
  // Its variants with outputs as arguments are sent, although torch composes them: of kernels that accept
  // only
  // certain devices, or that write to several outputs.
  SENT_WITH_OUTPUTS = 16,
  // The kernel changes the memory format that the meta function has set.
  KERNEL_SETS_FORMAT = 32,
};

// The bits of an op, by its name without overload ("aten::add"); 0 for one without a row.
uint8_t get_op_policy(const std::string& name);

}  // namespace genie
