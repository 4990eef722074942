// Reads replies of the executor, and waits for them. See connection.h.
#include <algorithm>
#include <chrono>

#include "connection.h"
#include "errors.h"
#include "interrupts.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t SOCKET_READ_WAIT_US_MAX = 500'000;
constexpr auto STATE_POLL_INTERVAL = std::chrono::milliseconds(20);
constexpr uint64_t BUFFERED_REPLY_BYTES_MAX = 64u << 20;
// Interrupted waits whose replies are still due. Below what the executor keeps for a client.
constexpr size_t ABANDONED_REPLIES_MAX = UNBOUND_REPLIES_MAX / 2;

}  // namespace

// --- waiting ------------------------------------------------------------------------------------

void Connection::wait_until(std::unique_lock<std::mutex>& lock, c10::function_ref<bool()> done) {
  auto started = Clock::now(), signals_checked = started;
  auto limit = std::chrono::duration<double>(options_.op_timeout_s);
  while (!done()) {
    if (is_session_lost_) {
      lock.unlock();
      raise_session_lost();
    }
    auto now = Clock::now();
    if (graphs_.is_recording_thread()) graphs_.update_last_used_time(now);
    if (now - signals_checked > SIGNAL_CHECK_INTERVAL) {
      lock.unlock();
      run_pending_signal_handlers();
      lock.lock();
      signals_checked = now;
      continue;
    }
    if (is_disconnected_) {
      state_changed_.wait_for(lock, STATE_POLL_INTERVAL);
      started = now;  // resuming has its own timeout
      continue;
    }
    if (now - std::max(started, reader_.last_received_at()) > limit) {
      lock.unlock();
      mark_session_lost("no reply for " + std::to_string(options_.op_timeout_s) + " s");
      lock.lock();
      continue;
    }
    if (frames_.is_sending_acknowledged_frame()) {
      state_changed_.wait_for(lock,
                              STATE_POLL_INTERVAL);  // the sending thread is about to update the frames
      continue;
    }
    lock.unlock();
    bool is_reader = try_read_replies_as_reader(SOCKET_READ_WAIT_US_MAX);
    lock.lock();
    if (is_reader || done() || is_session_lost_) continue;
    threads_waiting_for_reader_++;
    state_changed_.wait_for(lock, STATE_POLL_INTERVAL);
    threads_waiting_for_reader_--;
  }
}

void Connection::wait_for_reply(uint64_t reply_number, PendingReply& reply) {
  GilRelease release;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(lock, [&] { return reply.is_done; });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    abandon_pending_reply(lock, reply_number, reply);
    throw;
  }
  lock.unlock();
  if (reply.kind != ReplyKind::Reply) raise_reply_error(reply);
}

// The wait has ended because of a signal or a lost connection: `reply` and its memory are about to be
// destroyed. If the reply arrives later, it is read and discarded.
void Connection::abandon_pending_reply(std::unique_lock<std::mutex>& lock, uint64_t reply_number,
                                       PendingReply& reply) {
  bool is_due = replies_.remove(reply_number);
  threads_waiting_for_buffers_++;
  state_changed_.wait(lock, [&] { return !replies_.is_being_filled(reply); });
  threads_waiting_for_buffers_--;
  if (is_session_lost_) return;
  std::string error_text;
  try {
    replies_.abandon(reply_number, reply, is_due);
    bind_and_free_unbound_outputs();
    if (replies_.abandoned_count() > ABANDONED_REPLIES_MAX) {
      error_text =
          "no reply, and " + std::to_string(ABANDONED_REPLIES_MAX) + " waits for replies were interrupted";
    }
  } catch (const ProtocolError& error) {
    error_text = std::string("protocol violation by the executor: ") + error.what();
  }
  lock.unlock();
  if (!error_text.empty()) mark_session_lost(error_text);
}

void Connection::discard_outputs(uint64_t reply_number, uint32_t output_count) {
  std::lock_guard<std::mutex> lock(mutex_);
  replies_.add_unbound_outputs(reply_number, output_count);
  bind_and_free_unbound_outputs();
}

// Binds outputs of discarded DynamicOps and frees them at once. Not during a recording, which would record
// that.
void Connection::bind_and_free_unbound_outputs() {
  if (graphs_.is_recording() || is_session_lost_) return;
  auto& unbound = replies_.unbound_outputs();
  if (unbound.empty()) return;
  while (!unbound.empty()) {
    auto [number, count] = unbound.back();
    if (storage_numbers_.unassigned_count() < count) return;  // retried later
    std::vector<uint32_t> storages(count);
    for (uint32_t& storage : storages) storage = storage_numbers_.assign();
    WireWriter& records = frames_.records();
    records.begin_record(RecordKind::BindOutputs, count);
    records.write_u64(number);
    records.append_bytes(storages.data(), storages.size() * sizeof(uint32_t));
    for (uint32_t storage : storages) {
      records.begin_record(RecordKind::Free);
      records.write_u32(storage);
    }
    frames_.count_record();
    storage_numbers_.free(storages);
    unbound.pop_back();
  }
  if (is_sender_thread_asleep_) wake_sender_thread();
}

void Connection::raise_reply_error(const PendingReply& reply) {
  RemoteError remote;
  try {
    WireReader reader(reply.payload.data(), reply.payload.size());
    remote = read_remote_error(reader);
  } catch (const ProtocolError& error) {
    fail_session_and_raise(error);
  }
  raise_remote_error(remote, options_.device_name + ", " + options_.executor_description);
}

void Connection::fail_session_and_raise(const ProtocolError& error) {
  mark_session_lost(std::string("protocol violation by the executor: ") + error.what());
  raise_session_lost();
}

// --- reading ------------------------------------------------------------------------------------

// True if this thread was the reader.
bool Connection::try_read_replies_as_reader(int64_t timeout_us) {
  std::unique_lock<std::mutex> reading(read_mutex_, std::try_to_lock);
  if (!reading) return false;
  if (!stream_) return true;  // closed meanwhile
  bool received = true;
  try {
    received = read_reply(timeout_us);
    // Replies that arrived with the first one are read as well, without waiting.
    while (received && reader_.has_buffered_header() && read_reply(0)) {
    }
  } catch (const ProtocolError& error) {
    mark_session_lost(std::string("protocol violation by the executor: ") + error.what());
  } catch (const std::exception& error) {
    mark_disconnected(error.what());
  }
  reading.unlock();
  std::vector<ParcelFetch> completed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completed = fetches_.take_completed();
    if (received || threads_waiting_for_reader_ > 0) state_changed_.notify_all();
  }
  drop_fetched_parcels(completed);
  return true;
}

bool Connection::read_reply(int64_t timeout_us) {
  if (!reader_.is_in_reply()) {
    if (!reader_.read_header(*stream_, timeout_us)) return false;
    if (reader_.header().kind == ReplyKind::Acknowledge) {
      if (reader_.header().bytes) throw ProtocolError("an acknowledgement has a payload");
      std::lock_guard<std::mutex> lock(mutex_);
      check_acknowledged_frame_count(reader_.header().frames_received);
      acknowledge_frames(reader_.header().frames_received);
      return true;
    }
    begin_reading_payload();
  }
  while (!reader_.has_whole_payload()) {
    if (!read_payload_part(timeout_us)) return false;
  }
  if (reader_.header().kind == ReplyKind::Fatal) {
    mark_lost_by_fatal_reply();
  } else {
    deliver_reply();
  }
  return true;
}

void Connection::check_acknowledged_frame_count(uint64_t frames_received) const {
  if (frames_received > frames_.created_count())
    throw ProtocolError("acknowledgement of frames that were never sent");
}

void Connection::begin_reading_payload() {
  const ReplyHeader& header = reader_.header();
  if (header.kind != ReplyKind::Fatal && header.kind != ReplyKind::Reply && header.kind != ReplyKind::Error) {
    throw ProtocolError("a reply is of an unknown kind");
  }
  uint64_t destination_bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (header.kind != ReplyKind::Fatal && header.number > replies_.requested_count()) {
      throw ProtocolError("a reply without a request");
    }
    destination_bytes = replies_.destination_bytes(header.number);
  }
  bool goes_to_caller = header.kind == ReplyKind::Reply && destination_bytes;
  if (goes_to_caller && header.bytes != destination_bytes)
    throw ProtocolError("a reply has an unexpected size");
  if (!goes_to_caller && header.bytes > BUFFERED_REPLY_BYTES_MAX)
    throw ProtocolError("a reply is larger than allowed");
  reader_.begin_payload(goes_to_caller);
}

// A caller's memory is written to only between begin_fill() and end_fill(), so that the caller can stop
// waiting.
bool Connection::read_payload_part(int64_t timeout_us) {
  uint8_t* destination = nullptr;
  if (reader_.goes_to_caller()) {
    std::lock_guard<std::mutex> lock(mutex_);
    destination = replies_.begin_fill(reader_.header().number);
  }
  struct ReplyFillGuard {
    Connection& connection;
    ~ReplyFillGuard() {
      std::lock_guard<std::mutex> lock(connection.mutex_);
      connection.replies_.end_fill();
      if (connection.threads_waiting_for_buffers_) connection.state_changed_.notify_all();
    }
  } filled{*this};
  return reader_.read_payload_part(*stream_, timeout_us, destination);
}

void Connection::mark_lost_by_fatal_reply() {
  std::vector<uint8_t> payload = reader_.take_payload();
  WireReader reader(payload.data(), payload.size());
  RemoteError error = read_remote_error(reader);
  mark_session_lost(to_ascii(error.message + " (" + error.code + ")"));
}

void Connection::deliver_reply() {
  std::vector<uint8_t> payload = reader_.take_payload();
  std::lock_guard<std::mutex> lock(mutex_);
  check_acknowledged_frame_count(reader_.header().frames_received);
  acknowledge_frames(reader_.header().frames_received);
  replies_.deliver(reader_.header(), std::move(payload));
  bind_and_free_unbound_outputs();
}

void Connection::synchronize() {
  check_not_recording("synchronizing");
  PendingReply reply;
  LockedRecordWriter writer(*this);
  writer.records().begin_record(RecordKind::Sync);
  uint64_t number = writer.finish_record_and_request_reply(reply);
  wait_for_reply(number, reply);
}

}  // namespace genie
