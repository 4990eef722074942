// See reply_table.h.
#include "reply_table.h"

namespace genie {

namespace {

// The number of new tensors in the reply to a DynamicOp.
uint32_t count_new_outputs(WireReader& in, bool in_list = false) {
  switch (static_cast<OutputKind>(in.read_u8())) {
    case OutputKind::None:
      return 0;
    case OutputKind::New: {
      in.read_u8();
      in.consume(2 * sizeof(int64_t) * in.read_u8());
      return 1;
    }
    case OutputKind::Alias:
      in.read_u32();
      return 0;
    case OutputKind::List: {
      if (in_list) throw ProtocolError("an output is malformed");
      uint32_t count = 0, items = in.read_u32();
      if (items > LIST_ITEMS_MAX) throw ProtocolError("an output list is longer than allowed");
      for (uint32_t left = items; left > 0; left--) count += count_new_outputs(in, true);
      return count;
    }
    case OutputKind::Integer:
    case OutputKind::Float:
      in.consume(8);
      return 0;
    case OutputKind::Boolean:
      in.read_u8();
      return 0;
    case OutputKind::Complex:
      in.consume(16);
      return 0;
  }
  throw ProtocolError("an output is of an unknown kind");
}

uint32_t count_reply_outputs(const std::vector<uint8_t>& payload) {
  WireReader in(payload.data(), payload.size());
  uint32_t count = 0;
  for (uint32_t left = in.read_u32(); left > 0; left--) count += count_new_outputs(in);
  return count;
}

}  // namespace

uint64_t ReplyTable::destination_bytes(uint64_t reply_number) const {
  auto pending = pending_.find(reply_number);
  if (pending != pending_.end()) return pending->second->destination_bytes;
  auto abandoned = abandoned_.find(reply_number);
  return abandoned != abandoned_.end() ? abandoned->second.destination_bytes : 0;
}

uint8_t* ReplyTable::begin_fill(uint64_t reply_number) {
  auto found = pending_.find(reply_number);
  if (found == pending_.end()) return nullptr;
  being_filled_ = found->second;
  return static_cast<uint8_t*>(found->second->destination);
}

void ReplyTable::deliver(const ReplyHeader& header, std::vector<uint8_t> payload) {
  if (header.number != received_count_ + 1) throw ProtocolError("a reply is missing or duplicated");
  received_count_ = header.number;
  auto abandoned = abandoned_.find(header.number);
  if (abandoned != abandoned_.end()) {
    bool needs_output_binding = abandoned->second.needs_output_binding && header.kind == ReplyKind::Reply;
    abandoned_.erase(abandoned);
    if (needs_output_binding) add_unbound_outputs(header.number, count_reply_outputs(payload));
  }
  auto found = pending_.find(header.number);
  if (found == pending_.end()) return;
  PendingReply* reply = found->second;
  reply->payload = std::move(payload);
  reply->kind = header.kind;
  reply->is_done = true;
  pending_.erase(found);
}

void ReplyTable::abandon(uint64_t reply_number, const PendingReply& reply, bool is_due) {
  if (is_due) {
    abandoned_[reply_number] = {reply.destination_bytes, reply.needs_output_binding};
  } else if (reply.needs_output_binding && reply.kind == ReplyKind::Reply) {
    add_unbound_outputs(reply_number, count_reply_outputs(reply.payload));
  }
}

}  // namespace genie
