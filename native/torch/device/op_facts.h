// What is known of an op before it is ever called: how its arguments and outputs are to be taken.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace genie {

struct OpFacts {
  size_t arguments = 0, returns = 0;
  bool values_are_data = false;  // numbers do not decide about shapes
  bool writes = false;
  bool takes_cpu_index = false;  // CUDA takes CPU tensors as indices here, and so does this device
  bool depends_on_values = false;
  bool masks_decide = false;  // outputs depend on values where an index, in the second argument, is a mask
  bool meta_is_trusted = true;
  std::vector<bool> is_number, is_written;
  // Statistics of batch norm, which its older ops write to although their schemas do not say so; when they
  // train, as the argument at `training_at` says, or always where there is none.
  std::vector<bool> is_statistic;
  bool hides_writes = false;
  std::optional<size_t> training_at;
};

// Worked out once for each op, and kept for ever.
const OpFacts& find_facts(const c10::OperatorHandle& op);

bool contains(const std::string& text, std::initializer_list<const char*> parts);
bool takes_tensor(const c10::Argument& argument);

}  // namespace genie
