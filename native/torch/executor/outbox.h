// What goes to the client: replies, which are kept until the client says that it has them, and
// acknowledgements.
//
// A connection that breaks loses nothing: the next one sends again what the client does not have. A large
// reply is not copied to be kept; the tensor is, until someone is about to write to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../stream.h"
#include "../wire.h"
#include "copies.h"
#include "failure.h"
#include "storages.h"

namespace genie {

class Outbox {
 public:
  // Looks for room in the socket for `spin_us` before it sleeps.
  Outbox(StorageTable& storages, Copies& copies, int64_t spin_us)
      : storages_(storages), copies_(copies), spin_us_(spin_us) {}

  // Sends the replies after `replies_received` again. ProtocolError when there are none such.
  void connect(Stream& stream, uint64_t replies_received);
  void disconnect() { stream_ = nullptr; }
  // Forgets every reply: there will be no other connection.
  void clear() { replies_received(last_number_); }
  // The connection broke while something was sent.
  bool lost() const { return lost_; }

  uint64_t frames_received() const { return frames_received_.load(std::memory_order_relaxed); }
  // The number of the reply that is sent next.
  uint64_t next_number() const { return last_number_ + 1; }

  // A frame has arrived whole.
  void frame_received(uint64_t number, size_t bytes);
  // The client has these replies. ProtocolError when they were never sent.
  void replies_received(uint64_t number);

  void reply(const Writer& payload);
  void reply_error(const Failure& failure);
  // A contiguous tensor without lazy bits. `own`: nobody else will ever write to it.
  void reply_tensor(at::Tensor contiguous, bool own);

  bool owes_acknowledgement() const { return unacknowledged_frames_ > 0; }
  void acknowledge();
  void acknowledge_if_due();
  // The last words of a session.
  void say_farewell(const Failure& failure);

  // Whether replies that were not received yet stand on the client's own memory.
  bool lends() const { return lent_ > 0; }
  // Something is about to be written there: replies that would read it later are copied out now.
  void before_write(const c10::Storage& storage) {
    if (lent_ > 0) copy_out(storage);
  }
  // The client lets the storage go; replies that still need it take it over.
  void before_free(const c10::Storage& storage, uint64_t bytes) {
    if (lent_ > 0) take_over(storage, bytes);
  }

 private:
  struct Reply {
    uint64_t number = 0;
    ReplyKind kind = ReplyKind::Reply;
    std::vector<uint8_t> frame;  // header and payload; the header is written when it is sent
    at::Tensor tensor;           // the payload, when it is large
    bool lent = false;           // others may write to the tensor
    bool taken_over = false;     // it was lent, and the client has let it go
    uint64_t counted_bytes = 0;
  };

  std::vector<uint8_t> take_frame(size_t payload_bytes);
  Reply& keep(ReplyKind kind, std::vector<uint8_t> frame);
  void count(Reply& reply, uint64_t bytes);
  void send(Reply& reply);
  void send_header(Reply& reply);
  void write(const void* from, size_t bytes);
  void forget(Reply& reply);
  void copy_out(const c10::Storage& storage);
  void take_over(const c10::Storage& storage, uint64_t bytes);

  StorageTable& storages_;
  Copies& copies_;
  const int64_t spin_us_;
  Stream* stream_ = nullptr;
  bool lost_ = false;
  bool within_reply_ = false;
  std::deque<Reply> kept_;
  std::vector<std::vector<uint8_t>> spare_frames_;
  uint32_t lent_ = 0;
  uint64_t last_number_ = 0;
  std::atomic<uint64_t> frames_received_{0};
  uint32_t unacknowledged_frames_ = 0;
  uint64_t unacknowledged_bytes_ = 0;
};

}  // namespace genie
