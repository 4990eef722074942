// Tracks the parcels that a connection's executor fetches from others, and drops them at their source
// afterwards. Does not issue the copies (executor_copy.cpp).
#include "connection.h"

namespace genie {

void Connection::LockedRecordWriter::finish_fetch_parcel_record(ConnectionPtr source, uint64_t parcel_number,
                                                                uint64_t bytes) {
  if (connection_.is_session_lost_) {
    lock_.unlock();
    connection_.raise_session_lost();
  }
  connection_.pending_fetches_.push_back(
      {connection_.frames_.created_count() + 1, std::move(source), parcel_number, bytes});
  connection_.pending_fetch_bytes_ += bytes;
  finish_record_and_send_frame();
}

// The executor acknowledges the frame of a FetchParcel when the fetch has ended, successfully or not.
void Connection::move_completed_fetches(uint64_t frames_received) {
  while (!pending_fetches_.empty() && pending_fetches_.front().frame_number <= frames_received) {
    pending_fetch_bytes_ -= pending_fetches_.front().bytes;
    completed_fetches_.push_back(std::move(pending_fetches_.front()));
    pending_fetches_.pop_front();
  }
}

void Connection::drop_fetched_parcels(const std::vector<PendingFetch>& completed) noexcept {
  for (const PendingFetch& each : completed) each.source_connection->drop_parcel(each.parcel_number);
}

void Connection::drop_parcel(uint64_t parcel_number) noexcept {
  if (is_abandoned_after_fork_.load(std::memory_order_acquire) || is_session_lost()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  frames_.records().begin_record(RecordKind::DropParcel);
  frames_.records().write_u64(parcel_number);
  frames_.count_record();
  if (is_sender_thread_asleep_) wake_sender_thread();
}

}  // namespace genie
