// One call of an op, split into the key of its template and the data that is sent with it.
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
  std::vector<const at::Tensor*> tensors;  // remote tensors, in order; owned by the stack
  std::unordered_map<const c10::StorageImpl*, int64_t> first_on;  // storage -> tensor; used for many tensors
  at::Generator generator;  // at most one; its number is at `generator_at` in the data
  size_t generator_at = 0;
  Connection* connection = nullptr;
  const at::Tensor* on_cpu = nullptr;  // a CPU tensor that would have to be moved

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
