// One call of an op, split into the key of its template and the data that is sent with it.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "../settings.h"
#include "connection.h"

namespace genie {

struct OpCall {
  std::vector<int64_t> template_key;
  BaseSettings base_settings;
  std::optional<KernelSettings> kernel_settings;  // if the op depends on them
  WireWriter record_data;
  std::vector<const at::Tensor*> remote_tensors;  // in order; owned by the stack
  std::unordered_map<const c10::StorageImpl*, int64_t>
      first_tensor_index_by_storage;  // storage -> tensor; used for many tensors
  at::Generator generator;            // at most one; its number is at `generator_offset` in the data
  size_t generator_offset = 0;
  Connection* connection = nullptr;  // kept alive by a tensor, or by `kept_connection`
  ConnectionPtr kept_connection;
  const at::Tensor* misplaced_cpu_tensor = nullptr;  // a CPU tensor that would have to be moved

  void clear() {
    template_key.clear();
    record_data.clear();
    remote_tensors.clear();
    if (!first_tensor_index_by_storage.empty()) first_tensor_index_by_storage.clear();
    release_references();
    connection = nullptr;
    misplaced_cpu_tensor = nullptr;
  }

  // What a call that is not running must not keep alive.
  void release_references() {
    generator = at::Generator();
    kept_connection.reset();
  }
};

}  // namespace genie
