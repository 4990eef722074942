// One call of an op, taken apart: what a template is found by (the key), and what goes with it (the data).
#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "connection.h"

namespace genie {

struct Call {
  std::vector<int64_t> key;
  Writer data;
  std::vector<const at::Tensor*> tensors;                         // remote ones, in order; owned by the stack
  std::unordered_map<const c10::StorageImpl*, int64_t> first_on;  // storage -> tensor; once there are many
  at::Generator generator;  // at most one; its number stands at `generator_at` of the data
  size_t generator_at = 0;
  Connection* connection = nullptr;
  const at::Tensor* on_cpu = nullptr;  // a tensor that would have to be moved

  void clear() {
    key.clear();
    data.clear();
    tensors.clear();
    if (!first_on.empty()) first_on.clear();
    generator = at::Generator();
    connection = nullptr;
    on_cpu = nullptr;
  }
};

}  // namespace genie
