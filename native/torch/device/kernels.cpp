// Kernels that run in the client: creating tensors, views, and copies between this machine and executors.
// Not here: copies between executors (executor_copy.cpp), and all other ops (dispatch.cpp).
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "executor_copy.h"
#include "device_type.h"
#include "dispatch.h"
#include "errors.h"
#include "device_registry.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;

bool is_remote(const Tensor& tensor) { return tensor.device().type() == DEVICE_TYPE; }

// --- factories ----------------------------------------------------------------------------------

ConnectionPtr connection_of_device(std::optional<c10::Device> device) {
  return device_registry().get_or_open_connection(device && device->has_index() ? device->index() : -1);
}

void check_tensor_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  if (layout && *layout != at::kStrided) {
    raise_python_error("device.op_refused", "remote_accelerator supports strided tensors only");
  }
  if (pin_memory && *pin_memory) {
    raise_python_error("device.op_refused",
                       "memory on remote_accelerator cannot be pinned; pin the tensor on the CPU");
  }
}

bool fills_uninitialized_memory() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::ScalarType default_dtype() { return at::typeMetaToScalarType(at::get_default_dtype()); }

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pin_memory) {
  check_tensor_options(layout, pin_memory);
  OutputSpec output;
  output.dtype = dtype.value_or(default_dtype());
  if (!is_supported_dtype(output.dtype)) {
    raise_python_error("device.op_refused", std::string("remote_accelerator does not support dtype ") +
                                                c10::toString(output.dtype));
  }
  TORCH_CHECK(sizes.size() == strides.size(), "sizes and strides differ in length");
  check_dimension_count(static_cast<int64_t>(sizes.size()));
  for (int64_t size : sizes)
    TORCH_CHECK(size >= 0, "Trying to create tensor with negative dimension ", size, ": ", sizes);
  output.sizes.assign(sizes.begin(), sizes.end());
  output.strides.assign(strides.begin(), strides.end());
  uint64_t bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(output.dtype));
  check_storage_bytes(bytes);
  output.storage_bytes = static_cast<int64_t>(bytes);
  ConnectionPtr connection = connection_of_device(device);
  uint32_t storage;
  {
    Connection::LockedRecordWriter writer(*connection);
    storage = writer.assign_storage_number();
    writer.records().begin_record(RecordKind::Allocate);
    writer.records().write_u32(storage);
    writer.records().write_u64(static_cast<uint64_t>(output.storage_bytes));
    writer.finish_record();
  }
  Tensor made = make_remote_tensor(*connection, storage, output);
  if (fills_uninitialized_memory()) at::native::fill_empty_deterministic_(made);
  if (connection->options().waits_for_every_op && !connection->is_recording_thread())
    connection->synchronize();
  return made;
}

void check_rank_of_format(size_t rank, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(format != at::MemoryFormat::ChannelsLast || rank == 4,
              "required rank 4 tensor to use channels_last format");
  TORCH_CHECK(format != at::MemoryFormat::ChannelsLast3d || rank == 5,
              "required rank 5 tensor to use channels_last_3d format");
}

std::vector<int64_t> compute_strides(c10::IntArrayRef sizes, at::MemoryFormat format) {
  if (format == at::MemoryFormat::ChannelsLast) return c10::get_channels_last_strides_2d(sizes);
  if (format == at::MemoryFormat::ChannelsLast3d) return c10::get_channels_last_strides_3d(sizes);
  auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> format) {
  for (int64_t size : sizes)
    TORCH_CHECK(size >= 0, "Trying to create tensor with negative dimension ", size, ": ", sizes);
  check_rank_of_format(sizes.size(), format);
  return empty_strided(sizes, compute_strides(sizes, format.value_or(at::MemoryFormat::Contiguous)), dtype,
                       layout, device, pin_memory);
}

// In torch, a cheaper form of zeros.
Tensor zeros_for_autograd(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                          std::optional<at::Layout> layout, std::optional<c10::Device> device,
                          std::optional<bool> pin_memory) {
  return empty(sizes, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

// A single op. torch's own implementation creates an empty tensor and resizes it, which takes two ops and
// cannot be part of a graph. The dtype is passed, because the default dtype is a setting of this process.
Tensor arange(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step,
              std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
              std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_tensor_options(layout, pin_memory);
  if (!dtype) {
    bool integral = start.isIntegral(true) && end.isIntegral(true) && step.isIntegral(true);
    dtype = integral ? at::kLong : default_dtype();
  }
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::arange", "start_step");
  torch::jit::Stack stack{start, end, step, *dtype, layout, device, c10::IValue()};
  send_op(op, {}, &stack);
  return stack.back().toTensor();
}

Tensor arange_end(const at::Scalar& end, std::optional<at::ScalarType> dtype,
                  std::optional<at::Layout> layout, std::optional<c10::Device> device,
                  std::optional<bool> pin_memory) {
  return arange(0, end, 1, dtype, layout, device, pin_memory);
}

Tensor arange_start_end(const at::Scalar& start, const at::Scalar& end, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout> layout, std::optional<c10::Device> device,
                        std::optional<bool> pin_memory) {
  return arange(start, end, 1, dtype, layout, device, pin_memory);
}

// --- copying ------------------------------------------------------------------------------------

Tensor resolve_and_make_contiguous(const Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// `source` is on the CPU, contiguous, of the target's dtype and shape.
void upload_tensor(const Tensor& target, const Tensor& source) {
  check_tensor_can_be_sent(*target.unsafeGetTensorImpl());
  ConnectionPtr kept = storage_handle_of(target).connection;
  Connection& connection = *kept;
  uint64_t bytes = source.nbytes();
  auto write = [&](WireWriter& records, bool is_inline) {
    records.begin_record(RecordKind::Put, is_inline);
    write_storage_view(records, target);
    records.write_u64(bytes);
  };
  connection.check_not_recording("a copy from this machine");
  if (bytes <= INLINE_UPLOAD_BYTES_MAX) {
    Connection::LockedRecordWriter writer(connection);
    write(writer.records(), true);
    writer.records().append_bytes(source.const_data_ptr(), bytes);
    writer.finish_record();
  } else {
    connection.send_upload([&](WireWriter& records) { write(records, false); }, source.const_data_ptr(),
                           bytes);
  }
  if (connection.options().waits_for_every_op) connection.synchronize();
}

// `target` is on the CPU, contiguous, of the source's dtype and shape, and neither is a lazy conjugate or
// negation.
void download_tensor(const Tensor& source, const Tensor& target) {
  check_tensor_can_be_sent(*source.unsafeGetTensorImpl());
  ConnectionPtr connection = storage_handle_of(source).connection;
  connection->check_not_recording("a copy to this machine");
  PendingReply reply;
  reply.destination = target.mutable_data_ptr();
  reply.destination_bytes = target.nbytes();
  if (!reply.destination) {  // no elements: nothing to fetch, but earlier errors are raised
    connection->synchronize();
    return;
  }
  Connection::LockedRecordWriter writer(*connection);
  writer.records().begin_record(RecordKind::Get);
  write_storage_view(writer.records(), source);
  uint64_t number = writer.finish_record_and_request_reply(reply);
  connection->wait_for_reply(number, reply);
}

// Conversions that have the same result on every processor. A floating point number that is out of the range
// of the integers is converted as on the CPU, where torch converts it.
bool is_converted_alike_everywhere(at::ScalarType from, at::ScalarType to) {
  return c10::isIntegralType(from, /*includeBool=*/true) || !c10::isIntegralType(to, /*includeBool=*/false);
}

// Tensors are converted on the side that sends fewer bytes.
bool converts_after_transfer(at::ScalarType from, at::ScalarType to) {
  return is_supported_dtype(from) && c10::elementSize(from) < c10::elementSize(to) &&
         is_converted_alike_everywhere(from, to);
}

bool converts_before_transfer(at::ScalarType from, at::ScalarType to) {
  return is_supported_dtype(to) && c10::elementSize(to) < c10::elementSize(from) &&
         is_converted_alike_everywhere(from, to);
}

void copy_to_remote(const Tensor& target, const Tensor& source) {
  check_tensor_can_be_sent(*target.unsafeGetTensorImpl());
  Tensor sent = source;
  if (!converts_after_transfer(source.scalar_type(), target.scalar_type()))
    sent = source.to(target.scalar_type());
  bool is_same_kind = sent.scalar_type() == target.scalar_type() && !target.is_conj() && !target.is_neg();
  if (is_same_kind && sent.numel() == target.numel()) {
    upload_tensor(target, resolve_and_make_contiguous(sent.expand(target.sizes())));
    return;
  }
  // The executor expands and converts what was sent.
  Tensor staged = at::empty(
      sent.sizes(), sent.options().device(target.device()).memory_format(at::MemoryFormat::Contiguous));
  upload_tensor(staged, resolve_and_make_contiguous(sent));
  target.copy_(staged);
}

void copy_to_local(const Tensor& target, const Tensor& source) {
  check_tensor_can_be_sent(*source.unsafeGetTensorImpl());
  Tensor sent = source;
  if (converts_before_transfer(source.scalar_type(), target.scalar_type()))
    sent = source.to(target.scalar_type());
  sent = sent.resolve_conj().resolve_neg();
  bool is_direct = target.device().is_cpu() && sent.scalar_type() == target.scalar_type() &&
                   sent.numel() == target.numel() && target.is_contiguous() && !target.is_conj() &&
                   !target.is_neg();
  if (is_direct) {
    download_tensor(sent.expand(target.sizes()), target);
    return;
  }
  Tensor staged =
      at::empty(sent.sizes(), sent.options().device(at::kCPU).memory_format(at::MemoryFormat::Contiguous));
  download_tensor(sent, staged);
  target.copy_(staged);
}

// The checks of torch's copy_: shapes, and memory that overlaps. They read no memory.
void check_copy(const Tensor& self, const Tensor& source) {
  TORCH_CHECK(
      !self._is_zerotensor(),
      "ZeroTensors are immutable. Please materialize the tensor using `.clone()`, if you want a mutable "
      "zero tensor.");
  TORCH_CHECK(source.layout() == at::kStrided && self.layout() == at::kStrided,
              "copy_() between dense and sparse Tensors is not implemented! Found self type = ",
              self.toString(), " and src type = ", source.toString());
  bool is_plain = self.sizes() == source.sizes() && self.is_non_overlapping_and_dense() &&
                  !self.storage().is_alias_of(source.storage());
  if (is_plain) return;
  at::TensorIteratorConfig()
      .add_output(self)
      .add_const_input(source)
      .resize_outputs(false)
      .check_all_same_dtype(false)
      .check_all_same_device(false)
      .build();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  check_copy(self, source);
  if (self.numel() == 0) return self;
  bool from = is_remote(source), to = is_remote(self);
  if (from && to && source.device() == self.device()) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    torch::jit::Stack stack{self, source, non_blocking};
    send_op(op, {}, &stack);
  } else if (from && to) {
    copy_between_executors(self, source);
  } else if (to) {
    copy_to_remote(self, source.device().is_cpu() ? source : source.to(at::kCPU));
  } else {
    copy_to_local(self, source);
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor into = target;
  copy_(into, source, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  Tensor local = at::empty({}, tensor.options().device(at::kCPU));
  download_tensor(tensor.resolve_conj().resolve_neg(), local);
  return local.item();
}

// --- storages ------------------------------------------------------------------------------------

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(format != at::MemoryFormat::Preserve, "Unsupported memory format", at::MemoryFormat::Preserve);
  for (int64_t size : sizes)
    TORCH_CHECK(size >= 0, "Trying to resize a tensor to a negative dimension ", size, ": ", sizes);
  auto* impl = self.unsafeGetTensorImpl();
  auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  auto bytes_before = static_cast<int64_t>(self.storage().nbytes());
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  if (self.sizes() != sizes) impl->generic_set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  if (fills_uninitialized_memory()) at::native::fill_resize_deterministic_(self, bytes_before);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(storage), offset, sizes, strides);
  std::vector<int64_t> contiguous;
  if (!strides.data()) {
    contiguous = compute_strides(sizes, at::MemoryFormat::Contiguous);
    strides = contiguous;
  }
  auto bytes = at::detail::computeStorageNbytes(sizes, strides, self.itemsize(), offset);
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_empty(Tensor& self) {
  Tensor empty_tensor = at::empty({0}, self.options());
  return set_storage(self, empty_tensor.storage(), 0, {0}, {1});
}

Tensor& set_from_tensor(Tensor& self, const Tensor& source) {
  TORCH_CHECK(self.dtype() == source.dtype(), "Could not set tensor of type ", source.dtype(),
              " to a tensor of type ", self.dtype());
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor view(const Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }

// Executors check all indices, so the unchecked variants map to the checked ones.
Tensor unsafe_index_as_index(const Tensor& self, const c10::List<std::optional<Tensor>>& indices) {
  return at::index(self, indices);
}

Tensor unsafe_index_put_as_index_put(const Tensor& self, const c10::List<std::optional<Tensor>>& indices,
                                     const Tensor& values, bool accumulate) {
  return at::index_put(self, indices, values, accumulate);
}

bool is_pinned(const Tensor&, std::optional<c10::Device>) { return false; }

// Whether `tensor.data = other` is allowed: as between CPU and CUDA, so that Module.to() keeps the parameter
// objects, which an optimizer may hold.
bool has_compatible_type(const Tensor& self, const Tensor& other) {
  auto is_supported = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.device().is_cpu() || is_remote(tensor));
  };
  return is_supported(self) && is_supported(other) && !self.is_quantized() && !other.is_quantized();
}

}  // namespace

}  // namespace genie

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", genie::empty);
  m.impl("empty_strided", genie::empty_strided);
  m.impl("_efficientzerotensor", genie::zeros_for_autograd);
  m.impl("arange", genie::arange_end);
  m.impl("arange.start", genie::arange_start_end);
  m.impl("arange.start_step", genie::arange);
  m.impl("copy_", genie::copy_);
  m.impl("_copy_from", genie::copy_from);
  m.impl("_copy_from_and_resize", genie::copy_from_and_resize);
  m.impl("_local_scalar_dense", genie::local_scalar);
  m.impl("resize_", genie::resize_);
  m.impl("set_.source_Storage_storage_offset", genie::set_storage);
  m.impl("set_.source_Storage", genie::set_whole_storage);
  m.impl("set_.source_Tensor", genie::set_from_tensor);
  m.impl("set_", genie::set_empty);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", genie::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_unsafe_index.Tensor", genie::unsafe_index_as_index);
  m.impl("_unsafe_index_put", genie::unsafe_index_put_as_index_put);
  m.impl("is_pinned", genie::is_pinned);
  m.impl("_has_compatible_shallow_copy_type", genie::has_compatible_type);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", genie::has_compatible_type);
}
