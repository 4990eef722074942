// Copies bytes between tensors and host memory in chunks, through pinned buffers, while other chunks are
// being sent or received.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include "../wire.h"

namespace genie {

// A ring of pinned buffers: two, and more while uploads arrive faster than a busy accelerator copies them.
// Not used on a CPU.
class StagingBuffers {
 public:
  explicit StagingBuffers(c10::Device device) : device_(device) {}

  // Calls `consume` with the bytes of a contiguous tensor, chunk by chunk and in order.
  void for_each_chunk(const at::Tensor& contiguous_tensor,
                      const std::function<void(const uint8_t*, size_t)>& consume);
  void copy_to_host(const at::Tensor& contiguous_tensor, uint8_t* host_buffer);

  // Copies a few bytes to a contiguous tensor; `host_data` may be reused when this returns.
  void copy_from_host(const at::Tensor& contiguous_tensor, const uint8_t* host_data, size_t bytes);
  // Returns pinned memory for the next bytes of an upload, at most FRAME_BYTES_MAX.
  uint8_t* reserve_upload_bytes(size_t bytes);
  // Starts the copy of the reserved bytes to byte `start` of a contiguous tensor.
  void copy_reserved_to_tensor(const at::Tensor& contiguous_tensor, uint64_t start_bytes, size_t bytes);

 private:
  struct PinnedBuffer {
    at::Tensor memory;
    c10::Event copied_event;
  };

  PinnedBuffer& next_buffer();
  void record_copied_event(PinnedBuffer& buffer);

  c10::Device device_;
  std::vector<std::unique_ptr<PinnedBuffer>> buffers_;
  size_t last_buffer_index_ = 0;
  PinnedBuffer* buffer_being_filled_ = nullptr;  // has free memory after `filled_bytes_` bytes
  uint64_t filled_bytes_ = 0;
};

// A range of bytes of a contiguous tensor, as a tensor of bytes.
at::Tensor byte_range(const at::Tensor& contiguous_tensor, uint64_t start_bytes, uint64_t bytes);

// An upload started by a Put. It may span several frames and several connections.
class Upload {
 public:
  explicit Upload(StagingBuffers& staging) : staging_(staging) {}

  bool in_progress() const { return remaining_bytes_ > 0; }
  // If `target` is undefined the bytes are discarded. `staging_tensor` is contiguous: the target itself, or
  // memory of the same size that is copied to the target at the end.
  void begin(at::Tensor target, at::Tensor staging_tensor, uint64_t bytes);
  // Where to write the next bytes, at most FRAME_BYTES_MAX. ProtocolError if there are too many.
  uint8_t* next_destination(size_t bytes);
  // The bytes have been written to next_destination().
  void finish_write(size_t bytes);
  // Writes all bytes at once.
  void write_all_bytes(const uint8_t* data);
  // Releases the tensors; remaining bytes are discarded.
  void discard();

 private:
  void finish();

  StagingBuffers& staging_;
  at::Tensor target_, staging_tensor_;
  std::vector<uint8_t> discarded_bytes_;
  uint64_t remaining_bytes_ = 0;
  uint64_t written_bytes_ = 0;
};

}  // namespace genie
