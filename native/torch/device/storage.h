// Remote memory as a torch storage: its pointer is not dereferenceable, and its context identifies the remote
// storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "connection.h"

namespace genie {

// The executor treats more as a violation of the protocol.
constexpr uint64_t STORAGE_BYTES_MAX = INT64_MAX;
constexpr uint64_t VIEW_BYTES_MAX = uint64_t{1} << 62;
constexpr int64_t VIEW_OFFSET_MAX = int64_t{1} << 56;  // in elements

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

// Raises torch.OutOfMemoryError for a storage that no executor can allocate.
void check_storage_bytes(uint64_t bytes);

// Raises unless the executor accepts the tensor: its dtype is supported, and it is within its storage.
void check_tensor_can_be_sent(const c10::TensorImpl& tensor);

// Raises for more than DIMENSIONS_MAX dimensions.
void check_dimension_count(int64_t count);

}  // namespace genie
