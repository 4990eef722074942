// Remote memory as torch holds it: a storage whose pointer cannot be followed and whose context says where
// it really is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "connection.h"

namespace genie {

// Owned by a storage; tells the executor when the storage dies.
struct Handle {
  ConnectionPtr connection;
  uint32_t storage = 0;
};

// The storage's own; raises for a tensor that has none of ours.
Handle& handle_of(const c10::TensorImpl& tensor);
Handle& handle_of(const c10::StorageImpl& storage);
inline Handle& handle_of(const at::Tensor& tensor) { return handle_of(*tensor.unsafeGetTensorImpl()); }

// Whether it has one: not so the stand-ins that torch traces and maps functions with.
bool has_handle(const at::Tensor& tensor);

// A tensor on memory that the executor has, or will have when it comes to the record.
at::Tensor make_tensor(Connection& connection, uint32_t storage, const Output& output);
// Another look at the same memory.
at::Tensor make_view(const at::Tensor& source, const Output& output);
// Memory of this size.
c10::DataPtr allocate(Connection& connection, uint64_t bytes);
// Grows or shrinks it on both sides.
void resize_storage(c10::StorageImpl& storage, uint64_t bytes);

void write_view(Writer& writer, const at::Tensor& tensor);

}  // namespace genie
