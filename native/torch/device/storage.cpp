// See storage.h.
#include "storage.h"

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include "device_type.h"
#include "errors.h"
#include "memory.h"
#include "device_registry.h"

namespace genie {

namespace {

constexpr uint64_t PLACEHOLDER_POINTER_PREFIX = 0xDEAD;

void free_storage_and_handle(void* context) noexcept {
  auto* handle = static_cast<StorageHandle*>(context);
  handle->connection->free_storage(handle->storage_number);
  delete handle;
}

// Unique per storage, so that torch detects overlapping tensors; not a canonical address, so that
// dereferencing it faults.
void* make_placeholder_pointer(int index, uint32_t storage) {
  return reinterpret_cast<void*>(PLACEHOLDER_POINTER_PREFIX << 48 |
                                 static_cast<uint64_t>(index & 0xff) << 40 | static_cast<uint64_t>(storage));
}

c10::DataPtr make_data_ptr(Connection& connection, uint32_t storage) {
  int index = connection.options().device_index;
  auto* handle = new StorageHandle{ConnectionPtr::reclaim_copy(&connection), storage};
  return {make_placeholder_pointer(index, storage), handle, &free_storage_and_handle,
          c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(index))};
}

// torch.save reads a storage through a tensor that it makes from the raw pointer.
StorageHandle storage_handle_by_pointer(const void* pointer) {
  auto value = reinterpret_cast<uint64_t>(pointer);
  ConnectionPtr connection;
  if (value >> 48 == PLACEHOLDER_POINTER_PREFIX)
    connection = device_registry().find_open_connection(static_cast<int>(value >> 40 & 0xff));
  if (!connection)
    raise_python_error("device.op_refused", "this tensor has no memory on a remote accelerator");
  return {std::move(connection), static_cast<uint32_t>(value)};
}

}  // namespace

const StorageHandle* find_storage_handle(const c10::TensorImpl& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.unsafe_storage().unsafeGetStorageImpl()->data_ptr();
  if (data.get_deleter() != &free_storage_and_handle) return nullptr;
  return static_cast<const StorageHandle*>(data.get_context());
}

StorageHandle storage_handle_of(const c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() != &free_storage_and_handle) return storage_handle_by_pointer(data.get());
  return *static_cast<const StorageHandle*>(data.get_context());
}

StorageHandle storage_handle_of(const c10::TensorImpl& tensor) {
  if (!tensor.has_storage())
    raise_python_error("device.op_refused", "a tensor without a storage cannot be sent to an executor");
  return storage_handle_of(*tensor.unsafe_storage().unsafeGetStorageImpl());
}

at::Tensor make_remote_tensor(Connection& connection, uint32_t storage, const OutputSpec& output) {
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(output.storage_bytes),
      make_data_ptr(connection, storage), remote_allocator(), /*resizable=*/true);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(impl)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(output.dtype));
  auto* shell = tensor.unsafeGetTensorImpl();
  if (!output.is_contiguous) {
    shell->set_sizes_and_strides(output.sizes, output.strides);
  } else if (output.sizes.size() != 1 || output.sizes[0] != 0) {  // its initial shape
    shell->generic_set_sizes_contiguous(output.sizes);
  }
  return tensor;
}

at::Tensor make_remote_view(const at::Tensor& source, const OutputSpec& output) {
  // The keys include those of autograd, without which the view could not be written to.
  auto keys = source.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(source.storage()), keys, c10::scalarTypeToTypeMeta(output.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides,
                                                      output.offset + source.storage_offset());
  return tensor;
}

void check_storage_bytes(uint64_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= STORAGE_BYTES_MAX, "tried to allocate ", bytes,
                   " bytes on remote_accelerator; a storage has at most ", STORAGE_BYTES_MAX,
                   " bytes; use a smaller size");
}

c10::DataPtr allocate_remote_storage(Connection& connection, uint64_t bytes) {
  check_storage_bytes(bytes);
  uint32_t storage;
  {
    Connection::LockedRecordWriter writer(connection);
    storage = writer.assign_storage_number();
    writer.records().begin_record(RecordKind::Allocate);
    writer.records().write_u32(storage);
    writer.records().write_u64(bytes);
    writer.finish_record();
  }
  return make_data_ptr(connection, storage);
}

void resize_storage(c10::StorageImpl& storage, uint64_t bytes) {
  check_storage_bytes(bytes);
  StorageHandle handle = storage_handle_of(storage);
  if (storage.nbytes() == 0 && handle.connection->is_created_by_recording(handle.storage_number)) {
    // It is empty, so a new storage replaces it; an allocation can be recorded, a resize cannot.
    storage.set_data_ptr_noswap(allocate_remote_storage(*handle.connection, bytes));
    storage.set_nbytes(bytes);
    return;
  }
  handle.connection->check_not_recording("resizing a tensor");
  Connection::LockedRecordWriter writer(*handle.connection);
  writer.records().begin_record(RecordKind::Resize);
  writer.records().write_u32(handle.storage_number);
  writer.records().write_u64(bytes);
  writer.finish_record();
  storage.set_nbytes(bytes);
}

void check_dimension_count(int64_t count) {
  if (count <= static_cast<int64_t>(DIMENSIONS_MAX)) return;
  raise_python_error("device.op_refused", "a tensor on remote_accelerator has at most " +
                                              std::to_string(DIMENSIONS_MAX) + " dimensions, not " +
                                              std::to_string(count));
}

namespace {

[[noreturn]] void refuse_tensor(const std::string& reason) {
  raise_python_error("device.op_refused", "a tensor cannot be sent to remote_accelerator: " + reason);
}

// Offset of the end of the last element, in bytes; more than STORAGE_BYTES_MAX if it overflows.
uint64_t storage_end_bytes(const c10::TensorImpl& tensor) {
  int64_t end = tensor.storage_offset(), distance = 0;
  bool overflows = __builtin_add_overflow(end, int64_t{1}, &end);
  auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); i++) {
    overflows |= __builtin_mul_overflow(sizes[i] - 1, strides[i], &distance) ||
                 __builtin_add_overflow(end, distance, &end);
  }
  overflows |= __builtin_mul_overflow(end, static_cast<int64_t>(tensor.itemsize()), &end);
  return overflows ? STORAGE_BYTES_MAX + 1 : static_cast<uint64_t>(end);
}

}  // namespace

void check_tensor_can_be_sent(const c10::TensorImpl& tensor) {
  if (!is_supported_dtype(tensor.dtype().toScalarType()))
    refuse_tensor(std::string("dtype ") + c10::toString(tensor.dtype().toScalarType()) + " is not supported");
  auto sizes = tensor.sizes(), strides = tensor.strides();
  check_dimension_count(static_cast<int64_t>(sizes.size()));
  bool is_negative = tensor.storage_offset() < 0;
  for (size_t i = 0; i < sizes.size(); i++) is_negative |= sizes[i] < 0 || strides[i] < 0;
  if (is_negative) refuse_tensor("its offset, a size or a stride is negative");
  int64_t count = tensor.numel();
  if (count == 0) {
    if (tensor.storage_offset() > VIEW_OFFSET_MAX) refuse_tensor("its offset is too large");
    return;
  }
  uint64_t end = storage_end_bytes(tensor), bytes = tensor.unsafe_storage().nbytes();
  if (end > bytes) {
    refuse_tensor(
        "it exceeds its storage, which was resized to " + std::to_string(bytes) + " bytes, and needs " +
        (end > STORAGE_BYTES_MAX ? "more than " + std::to_string(STORAGE_BYTES_MAX) : std::to_string(end)) +
        " bytes: resize the storage before using the tensor");
  }
  // An expanded tensor may be larger than its storage.
  TORCH_CHECK_WITH(OutOfMemoryError, static_cast<uint64_t>(count) <= VIEW_BYTES_MAX / tensor.itemsize(),
                   "a tensor of ", count, " elements is too large for remote_accelerator; at most ",
                   VIEW_BYTES_MAX, " bytes are allowed");
}

void write_storage_view(WireWriter& writer, const at::Tensor& tensor) {
  writer.write_u32(storage_handle_of(tensor).storage_number);
  writer.write_u8(static_cast<uint8_t>(tensor.scalar_type()));
  writer.write_u8(static_cast<uint8_t>(tensor.dim()));
  writer.write_u8((tensor.is_conj() ? VIEW_CONJUGATE : 0) | (tensor.is_neg() ? VIEW_NEGATIVE : 0));
  writer.write_u8(0);
  writer.write_i64(tensor.storage_offset());
  for (int64_t size : tensor.sizes()) writer.write_i64(size);
  for (int64_t stride : tensor.strides()) writer.write_i64(stride);
}

}  // namespace genie
