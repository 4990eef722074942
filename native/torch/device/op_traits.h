// Properties of an op that are derived from its schema: how to treat its arguments and outputs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace genie {

struct OpTraits {
  size_t argument_count = 0, return_count = 0;
  bool sends_numbers_as_data = false;  // numbers do not affect output shapes
  bool writes_arguments = false;
  bool accepts_cpu_indices = false;  // accepts CPU tensors as indices, as CUDA does
  bool outputs_depend_on_values = false;
  bool outputs_depend_on_masks =
      false;  // outputs depend on values if an index, in the second argument, is a mask
  bool has_reliable_meta_kernel = true;
  bool returns_device_property = false;  // a flag that does not depend on values
  std::vector<bool> has_numbers;         // per argument: a Scalar, or a list of them
  std::vector<bool> is_mutable_argument;
  bool shares_meta_function_with_kernels = false;  // so that the strides of its outputs are those of kernels
  // Batch norm statistics, which older ops write to although their schemas do not declare it: if the argument
  // at `training_argument_index` is true, or always if there is none.
  std::vector<bool> is_batch_norm_statistic;
  bool may_write_batch_norm_statistics = false;
  std::optional<size_t> training_argument_index;
};

// op_table.h caches them.
OpTraits compute_op_traits(const c10::OperatorHandle& op);

bool accepts_tensor(const c10::Argument& argument);

}  // namespace genie
