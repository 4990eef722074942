// Sends replies and acknowledgements to the client. Replies are kept until the client has received them, and
// sent again after a reconnect.
//
// A large reply is not copied: it borrows the tensor until something is about to write to its memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../stream.h"
#include "../wire.h"
#include "failure.h"
#include "staging.h"
#include "storage_table.h"

namespace genie {

class ReplyWriter {
 public:
  // Polls the socket for `spin_us` before it blocks.
  ReplyWriter(StorageTable& storages, StagingBuffers& staging, int64_t spin_us)
      : storages_(storages), staging_(staging), spin_us_(spin_us) {}

  // Sends the replies after `replies_received` again. ProtocolError if that number was never sent.
  void begin_connection(Stream& stream, uint64_t replies_received);
  void end_connection() { stream_ = nullptr; }
  // Drops all replies; for the end of the session.
  void clear() { release_replies(newest_reply_number_); }
  // Whether the connection broke while sending.
  bool is_connection_lost() const { return is_connection_lost_; }

  uint64_t frames_received() const { return frames_received_.load(std::memory_order_relaxed); }
  // Number of the next reply.
  uint64_t next_reply_number() const { return newest_reply_number_ + 1; }

  // Counts a frame that has arrived completely.
  void count_received_frame(uint64_t frame_number, size_t bytes);
  // Drops the replies up to `last_reply_number`, which the client has. ProtocolError if that was never sent.
  void release_replies(uint64_t last_reply_number);

  void send_reply(const WireWriter& payload);
  void send_error_reply(const Failure& failure);
  // A contiguous tensor without lazy bits. `is_owned`: its memory is not written to any more.
  void send_tensor_reply(at::Tensor contiguous_tensor, bool is_owned);

  bool has_unacknowledged_frames() const { return unacknowledged_frames_ > 0; }
  void acknowledge_frames();
  void acknowledge_frames_if_due();
  // Sends the error that ends the session.
  void send_fatal_error(const Failure& failure);

  // Whether unreceived replies use the memory of the client's tensors.
  bool has_borrowed_tensors() const { return borrowing_reply_count_ > 0; }
  // Copies the unreceived replies that use this memory; call before writing to it.
  void before_storage_written(const c10::Storage& storage) {
    if (borrowing_reply_count_ > 0) copy_replies_borrowing(storage);
  }
  // Unreceived replies that use this memory keep it; call before the client's storage is freed.
  void before_storage_freed(const c10::Storage& storage, uint64_t bytes) {
    if (borrowing_reply_count_ > 0) keep_storage_for_replies(storage, bytes);
  }

 private:
  struct KeptReply {
    uint64_t number = 0;
    ReplyKind kind = ReplyKind::Reply;
    std::vector<uint8_t> frame;     // header and payload; the header is filled in when it is sent
    at::Tensor tensor;              // the payload, if it is large
    bool borrows_tensor = false;    // the tensor's memory may be written to
    bool is_storage_freed = false;  // it was borrowed, and the client has freed the storage
    uint64_t counted_bytes = 0;
  };

  std::vector<uint8_t> new_reply_frame(size_t payload_bytes);
  KeptReply& add_reply(ReplyKind kind, std::vector<uint8_t> frame);
  void count_reply_memory(KeptReply& reply, uint64_t bytes);
  void send(KeptReply& reply);
  void send_header(KeptReply& reply);
  void write_to_stream(const void* data, size_t bytes);
  void release_reply(KeptReply& reply);
  void copy_replies_borrowing(const c10::Storage& storage);
  void keep_storage_for_replies(const c10::Storage& storage, uint64_t bytes);

  StorageTable& storages_;
  StagingBuffers& staging_;
  const int64_t spin_us_;
  Stream* stream_ = nullptr;
  bool is_connection_lost_ = false;
  bool is_reply_incomplete_ = false;
  std::deque<KeptReply> unreceived_replies_;
  std::vector<std::vector<uint8_t>> spare_frames_;
  uint32_t borrowing_reply_count_ = 0;
  uint64_t newest_reply_number_ = 0;
  std::atomic<uint64_t> frames_received_{0};
  uint32_t unacknowledged_frames_ = 0;
  uint64_t unacknowledged_bytes_ = 0;
};

}  // namespace genie
