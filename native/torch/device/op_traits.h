// Properties of an op that are derived from its schema: how to treat its arguments and outputs.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace genie {

struct OpTraits {
  size_t arguments = 0, returns = 0;
  bool values_are_data = false;  // numbers do not affect output shapes
  bool writes = false;
  bool takes_cpu_index = false;  // accepts CPU tensors as indices, as CUDA does
  bool depends_on_values = false;
  bool depends_on_masks = false;  // outputs depend on values if an index, in the second argument, is a mask
  bool trusts_meta = true;
  std::vector<bool> is_number, is_written;
  // Batch norm statistics, which older ops write to although their schemas do not declare it: if the argument
  // at `training_at` is true, or always if there is none.
  std::vector<bool> is_statistic;
  bool has_hidden_writes = false;
  std::optional<size_t> training_at;
};

// Computed once per op, and cached.
const OpTraits& traits_for(const c10::OperatorHandle& op);

bool contains(const std::string& text, std::initializer_list<const char*> parts);
bool takes_tensor(const c10::Argument& argument);

}  // namespace genie
