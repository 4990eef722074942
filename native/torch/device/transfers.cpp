// Uploads from this process, and parcels that executors fetch from each other. See connection.h.
#include <algorithm>

#include "connection.h"
#include "interrupts.h"

namespace genie {

namespace {

// Uploads are split into frames of this size, so that the executor can copy the first while others are in
// flight.
constexpr uint64_t UPLOAD_FRAME_BYTES = 1u << 20;
// Up to this size an upload is copied into frames, and the caller does not wait.
constexpr uint64_t COPIED_UPLOAD_BYTES_MAX = 1u << 20;

}  // namespace

// --- uploads --------------------------------------------------------------------------------------

void Connection::send_upload(const std::function<void(WireWriter&)>& write_record, const void* data,
                             uint64_t size_bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  bool external_payload = size_bytes > COPIED_UPLOAD_BYTES_MAX;
  GilRelease release;
  uint64_t first, last;
  {
    LockedRecordWriter writer(*this);
    write_record(writer.records());
    queue_records_as_frame();
    first = frames_.created_count() + 1;
    for (uint64_t at = 0; at < size_bytes; at += UPLOAD_FRAME_BYTES) {
      frames_.queue_upload_part(from + at, std::min(UPLOAD_FRAME_BYTES, size_bytes - at), external_payload,
                                replies_.received_count());
    }
    last = frames_.created_count();
    counters_.ops++;
  }
  send_frames_up_to(last);
  if (!external_payload) return;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(lock, [&] { return frames_.is_acknowledged(last); });
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    replace_external_payloads_with_zeros(first, last);
    throw;
  }
}

// The owner of external payloads stops waiting. The executor expects the announced number of bytes, and gets
// zeros for the rest.
void Connection::replace_external_payloads_with_zeros(uint64_t first_frame_number,
                                                      uint64_t last_frame_number) {
  std::unique_lock<std::mutex> lock(mutex_);
  threads_waiting_for_buffers_++;
  state_changed_.wait(
      lock, [&] { return frames_.replace_external_payloads(first_frame_number, last_frame_number); });
  threads_waiting_for_buffers_--;
}

// --- parcels --------------------------------------------------------------------------------------

void Connection::wait_for_fetch_window(uint64_t more_bytes) {
  GilRelease release;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(lock, [&] { return fetches_.has_space_for(more_bytes); });
}

void Connection::LockedRecordWriter::finish_fetch_parcel_record(ConnectionPtr source, uint64_t parcel_number,
                                                                uint64_t bytes) {
  if (connection_.is_session_lost_) {
    lock_.unlock();
    connection_.raise_session_lost();
  }
  connection_.fetches_.add(
      {connection_.frames_.created_count() + 1, std::move(source), parcel_number, bytes});
  finish_record_and_send_frame();
}

void Connection::drop_fetched_parcels(const std::vector<ParcelFetch>& completed) noexcept {
  for (const ParcelFetch& each : completed) each.source_connection->drop_parcel(each.parcel_number);
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
