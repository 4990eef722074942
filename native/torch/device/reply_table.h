// The replies that a connection expects: those that threads wait for, and those whose wait was interrupted.
// The mutex of the connection guards it. Does not read them (reply_reader.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../wire.h"

namespace genie {

// A reply that a thread waits for. The payload is written to `destination` if that is set, else to `payload`.
// `needs_output_binding`: it is the reply to a DynamicOp, whose outputs must be bound.
struct PendingReply {
  void* destination = nullptr;
  uint64_t destination_bytes = 0;
  bool needs_output_binding = false;
  std::vector<uint8_t> payload;
  ReplyKind kind = ReplyKind::Reply;
  bool is_done = false;
};

class ReplyTable {
 public:
  // Returns the number of the reply. `reply` must exist until it is done or abandoned.
  uint64_t request(PendingReply& reply) {
    pending_[++requested_count_] = &reply;
    return requested_count_;
  }
  uint64_t requested_count() const { return requested_count_; }
  // Thread-safe.
  uint64_t received_count() const { return received_count_.load(std::memory_order_relaxed); }

  // The size of the memory that a reply is written to; 0 if it has none.
  uint64_t destination_bytes(uint64_t reply_number) const;
  // The memory that a reply is written to until end_fill(); null if no thread waits for it any more.
  uint8_t* begin_fill(uint64_t reply_number);
  void end_fill() { being_filled_ = nullptr; }
  bool is_being_filled(const PendingReply& reply) const { return being_filled_ == &reply; }
  // The whole reply has arrived. ProtocolError if it is not the next one.
  void deliver(const ReplyHeader& header, std::vector<uint8_t> payload);

  // The wait for a reply was interrupted: its memory is no longer used once it is not being filled. Returns
  // whether the reply has not arrived yet.
  bool remove(uint64_t reply_number) { return pending_.erase(reply_number) > 0; }
  // After remove(): the reply is discarded, when it arrives if it `is_due`. ProtocolError if it is malformed.
  void abandon(uint64_t reply_number, const PendingReply& reply, bool is_due);
  size_t abandoned_count() const { return abandoned_.size(); }

  // New outputs of DynamicOps that are not used: the executor keeps them until they are bound and freed.
  struct UnboundOutputs {
    uint64_t reply_number;
    uint32_t count;
  };
  void add_unbound_outputs(uint64_t reply_number, uint32_t count) {
    if (count) unbound_outputs_.push_back({reply_number, count});
  }
  std::vector<UnboundOutputs>& unbound_outputs() { return unbound_outputs_; }

 private:
  struct AbandonedReply {
    uint64_t destination_bytes = 0;
    bool needs_output_binding = false;
  };

  uint64_t requested_count_ = 0;
  std::atomic<uint64_t> received_count_{0};
  std::map<uint64_t, PendingReply*> pending_;
  std::unordered_map<uint64_t, AbandonedReply> abandoned_;
  std::vector<UnboundOutputs> unbound_outputs_;
  const PendingReply* being_filled_ = nullptr;
};

}  // namespace genie
