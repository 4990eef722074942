#include "staging.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace genie {

namespace {

constexpr uint64_t STAGING_BUFFER_BYTES = FRAME_BYTES_MAX;
// Small enough to start sending early, large enough to amortize the cost of starting a copy.
constexpr uint64_t DOWNLOAD_CHUNK_BYTES = 1u << 20;
constexpr size_t STAGING_BUFFERS_MIN = 2;
constexpr size_t STAGING_BUFFERS_MAX = 16;

const uint8_t* host_data(const at::Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

at::Tensor empty_pinned_tensor(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).device(c10::kCPU).pinned_memory(true));
}

}  // namespace

at::Tensor byte_range(const at::Tensor& contiguous_tensor, uint64_t start_bytes, uint64_t bytes) {
  uint64_t first =
      static_cast<uint64_t>(contiguous_tensor.storage_offset()) * contiguous_tensor.itemsize() + start_bytes;
  auto flat = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(contiguous_tensor.storage()),
                                                       contiguous_tensor.key_set(),
                                                       c10::scalarTypeToTypeMeta(at::kByte));
  int64_t size = static_cast<int64_t>(bytes), stride = 1;
  flat.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(size), c10::IntArrayRef(stride),
                                                    static_cast<int64_t>(first));
  return flat;
}

void StagingBuffers::for_each_chunk(const at::Tensor& contiguous_tensor,
                                    const std::function<void(const uint8_t*, size_t)>& consume) {
  uint64_t size = contiguous_tensor.nbytes();
  if (size == 0) return;
  if (contiguous_tensor.device().is_cpu()) {
    consume(host_data(contiguous_tensor), size);
    return;
  }
  buffer_being_filled_ = nullptr;
  auto start_copy = [&](uint64_t start) -> PinnedBuffer& {
    uint64_t bytes = std::min(DOWNLOAD_CHUNK_BYTES, size - start);
    PinnedBuffer& buffer = next_buffer();
    buffer.memory.narrow(0, 0, static_cast<int64_t>(bytes))
        .copy_(byte_range(contiguous_tensor, start, bytes), /*non_blocking=*/true);
    record_copied_event(buffer);
    return buffer;
  };
  PinnedBuffer* current = &start_copy(0);
  for (uint64_t start = 0; start < size; start += DOWNLOAD_CHUNK_BYTES) {
    PinnedBuffer* next =
        start + DOWNLOAD_CHUNK_BYTES < size ? &start_copy(start + DOWNLOAD_CHUNK_BYTES) : nullptr;
    current->copied_event.synchronize();
    consume(host_data(current->memory), std::min(DOWNLOAD_CHUNK_BYTES, size - start));
    current = next;
  }
}

void StagingBuffers::copy_to_host(const at::Tensor& contiguous_tensor, uint8_t* host_buffer) {
  for_each_chunk(contiguous_tensor, [&host_buffer](const uint8_t* from, size_t bytes) {
    std::memcpy(host_buffer, from, bytes);
    host_buffer += bytes;
  });
}

void StagingBuffers::copy_from_host(const at::Tensor& contiguous_tensor, const uint8_t* host_data,
                                    size_t bytes) {
  if (bytes == 0) return;
  if (contiguous_tensor.device().is_cpu()) {
    std::memcpy(contiguous_tensor.mutable_data_ptr(), host_data, bytes);
    return;
  }
  std::memcpy(reserve_upload_bytes(bytes), host_data, bytes);
  copy_reserved_to_tensor(contiguous_tensor, 0, bytes);
}

uint8_t* StagingBuffers::reserve_upload_bytes(size_t bytes) {
  if (!buffer_being_filled_ || filled_bytes_ + bytes > STAGING_BUFFER_BYTES) {
    buffer_being_filled_ = &next_buffer();
    filled_bytes_ = 0;
  }
  return static_cast<uint8_t*>(buffer_being_filled_->memory.mutable_data_ptr()) + filled_bytes_;
}

void StagingBuffers::copy_reserved_to_tensor(const at::Tensor& contiguous_tensor, uint64_t start_bytes,
                                             size_t bytes) {
  auto from = buffer_being_filled_->memory.narrow(0, static_cast<int64_t>(filled_bytes_),
                                                  static_cast<int64_t>(bytes));
  byte_range(contiguous_tensor, start_bytes, bytes).copy_(from, /*non_blocking=*/true);
  filled_bytes_ += bytes;
  record_copied_event(*buffer_being_filled_);
}

// Never returns the last one again: the caller may still read it. Waits for a buffer that is in use only if
// there are STAGING_BUFFERS_MAX.
StagingBuffers::PinnedBuffer& StagingBuffers::next_buffer() {
  size_t next = buffers_.empty() ? 0 : (last_buffer_index_ + 1) % buffers_.size();
  bool grow = buffers_.size() < STAGING_BUFFERS_MIN ||
              (buffers_.size() < STAGING_BUFFERS_MAX && !buffers_[next]->copied_event.query());
  if (grow) {
    next = buffers_.empty() ? 0 : last_buffer_index_ + 1;
    auto added = std::make_unique<PinnedBuffer>(
        PinnedBuffer{empty_pinned_tensor(STAGING_BUFFER_BYTES), c10::Event(device_.type())});
    buffers_.insert(buffers_.begin() + static_cast<std::ptrdiff_t>(next), std::move(added));
  }
  last_buffer_index_ = next;
  PinnedBuffer& buffer = *buffers_[next];
  buffer.copied_event.synchronize();
  return buffer;
}

void StagingBuffers::record_copied_event(PinnedBuffer& buffer) {
  buffer.copied_event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void Upload::begin(at::Tensor target, at::Tensor staging_tensor, uint64_t bytes) {
  target_ = std::move(target);
  staging_tensor_ = std::move(staging_tensor);
  remaining_bytes_ = bytes;
  written_bytes_ = 0;
}

uint8_t* Upload::next_destination(size_t bytes) {
  if (bytes == 0 || bytes > remaining_bytes_)
    throw ProtocolError("the size of an upload differs from the announced size");
  if (!target_.defined()) {
    discarded_bytes_.resize(bytes);
    return discarded_bytes_.data();
  }
  if (!staging_tensor_.device().is_cpu()) return staging_.reserve_upload_bytes(bytes);
  return static_cast<uint8_t*>(staging_tensor_.mutable_data_ptr()) + written_bytes_;
}

void Upload::finish_write(size_t bytes) {
  remaining_bytes_ -= bytes;
  if (target_.defined() && !staging_tensor_.device().is_cpu())
    staging_.copy_reserved_to_tensor(staging_tensor_, written_bytes_, bytes);
  written_bytes_ += bytes;
  if (remaining_bytes_ == 0) finish();
}

void Upload::write_all_bytes(const uint8_t* data) {
  uint64_t bytes = remaining_bytes_;
  remaining_bytes_ = 0;
  if (target_.defined()) staging_.copy_from_host(staging_tensor_, data, bytes);
  finish();
}

void Upload::finish() {
  at::Tensor target = std::move(target_), staged = std::move(staging_tensor_);
  discard();
  if (!target.is_same(staged)) target.copy_(staged, /*non_blocking=*/true);
}

void Upload::discard() {
  target_.reset();
  staging_tensor_.reset();
  discarded_bytes_ = std::vector<uint8_t>();
}

}  // namespace genie
