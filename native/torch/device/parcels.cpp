// A connection's part in copies from one executor to another: what is on its way to its executor, and telling
// the one that sent it when nobody needs it any more. Not for: issuing such a copy (across.cpp).
#include "connection.h"

namespace genie {

void Connection::Batch::finish_land(ConnectionPtr from, uint64_t parcel, uint64_t bytes) {
  if (connection_.lost_) {
    lock_.unlock();
    connection_.raise_lost();
  }
  connection_.landings_.push_back({connection_.frames_made_ + 1, std::move(from), parcel, bytes});
  connection_.landing_bytes_ += bytes;
  finish_frame();
}

// The executor counts the frame of a Land as received when it is done with it, well or not.
void Connection::landed(uint64_t frames_received) {
  while (!landings_.empty() && landings_.front().frame <= frames_received) {
    landing_bytes_ -= landings_.front().bytes;
    landed_.push_back(std::move(landings_.front()));
    landings_.pop_front();
  }
}

void Connection::unship(const std::vector<Parcel>& over) noexcept {
  for (const Parcel& each : over) each.from->unship(each.number);
}

void Connection::unship(uint64_t parcel) noexcept {
  if (abandoned_.load(std::memory_order_acquire) || lost()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  records_.record(Record::Unship);
  records_.u64(parcel);
  records_pending_++;
  if (sender_asleep_) wake_sender();
}

}  // namespace genie
