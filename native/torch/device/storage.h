// Remote memory as a torch storage: its pointer is not dereferenceable, and its context identifies the remote
// storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "connection.h"

namespace genie {

// Owned by a torch storage; frees the executor's storage with it.
struct StorageHandle {
  ConnectionPtr connection;
  uint32_t storage_number = 0;
};

// A copy of the handle of a storage; raises for a tensor without remote memory.
StorageHandle storage_handle_of(const c10::TensorImpl& tensor);
StorageHandle storage_handle_of(const c10::StorageImpl& storage);
inline StorageHandle storage_handle_of(const at::Tensor& tensor) {
  return storage_handle_of(*tensor.unsafeGetTensorImpl());
}

// The handle that the storage of the tensor owns. Null for the fake tensors of torch's tracing and functional
// transforms, and for a tensor that was made from the pointer of a storage.
const StorageHandle* find_storage_handle(const c10::TensorImpl& tensor);
inline bool has_storage_handle(const at::Tensor& tensor) {
  return find_storage_handle(*tensor.unsafeGetTensorImpl()) != nullptr;
}

// A tensor on a storage of the executor, which may be created by a record that is still in flight.
at::Tensor make_remote_tensor(Connection& connection, uint32_t storage, const OutputSpec& output);
// A view of the same storage.
at::Tensor make_remote_view(const at::Tensor& source, const OutputSpec& output);
// Allocates a storage of this size.
c10::DataPtr allocate_remote_storage(Connection& connection, uint64_t bytes);
// Resizes the storage on both sides.
void resize_storage(c10::StorageImpl& storage, uint64_t bytes);

void write_storage_view(WireWriter& writer, const at::Tensor& tensor);

// Raises for more than DIMENSIONS_MAX dimensions.
void check_dimension_count(int64_t count);

}  // namespace genie
