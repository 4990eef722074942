// Makes the result tensors of a call from its predicted outputs. Inline, because it is on the hot path of
// every op.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "storage.h"
#include "templates.h"

namespace genie {

inline uint32_t count_new_storages(const OutputSpec& output) {
  uint32_t count = output.kind == OutputKind::New && !output.is_view;
  for (const OutputSpec& item : output.items) count += count_new_storages(item);
  return count;
}

inline c10::IValue make_result(const OutputSpec& output, Connection& connection, const uint32_t*& storages,
                               const std::vector<at::Tensor>& inputs) {
  switch (output.kind) {
    case OutputKind::New:
      if (output.is_view)
        return make_remote_view(inputs[static_cast<size_t>(output.source_input_index)], output);
      return make_remote_tensor(connection, *storages++, output);
    case OutputKind::Alias:
      return inputs[static_cast<size_t>(output.source_input_index)];
    case OutputKind::List: {
      c10::impl::GenericList items(output.constant.toList().elementType());
      for (const OutputSpec& item : output.items)
        items.push_back(make_result(item, connection, storages, inputs));
      return items;
    }
    case OutputKind::None:
      return output.constant.isNone() ? c10::IValue(at::Tensor()) : output.constant;
    default:
      return output.constant;
  }
}

inline std::vector<at::Tensor> copy_tensor_references(const std::vector<const at::Tensor*>& tensors) {
  std::vector<at::Tensor> copies;
  copies.reserve(tensors.size());
  for (const at::Tensor* tensor : tensors) copies.push_back(*tensor);
  return copies;
}

}  // namespace genie
