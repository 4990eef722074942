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
// Busy-waits like CUDA, for a limited time, on machines with enough cores.
constexpr int64_t REPLY_SPIN_US = 10'000;
constexpr unsigned REPLY_SPIN_CORES_MIN = 4;
constexpr auto STATE_POLL_INTERVAL = std::chrono::milliseconds(20);
// Pending parcels use memory on other executors.
constexpr uint64_t PENDING_FETCH_BYTES_MAX = 256u << 20;
constexpr size_t PENDING_FETCHES_MAX = 256;
constexpr uint64_t BUFFERED_REPLY_BYTES_MAX = 64u << 20;
// Interrupted waits whose replies are still due. Below what the executor keeps for a client.
constexpr size_t ABANDONED_REPLIES_MAX = UNBOUND_REPLIES_MAX / 2;

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

int64_t Connection::reply_spin_duration_us() {
  static const int64_t found =
      std::thread::hardware_concurrency() >= REPLY_SPIN_CORES_MIN ? REPLY_SPIN_US : 0;
  return found;
}

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
    if (is_recording_thread()) recording_thread_active_at_ = now;
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
    if (now - std::max(started, last_received_at_.load()) > limit) {
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

void Connection::wait_for_fetch_window(uint64_t more_bytes) {
  GilRelease release;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(lock, [&] {
    bool fits = pending_fetch_bytes_ + more_bytes <= PENDING_FETCH_BYTES_MAX &&
                pending_fetches_.size() < PENDING_FETCHES_MAX;
    return pending_fetches_.empty() || fits;
  });
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
  bool due = pending_replies_.erase(reply_number) > 0;
  threads_waiting_for_buffers_++;
  state_changed_.wait(lock, [&] { return reply_being_filled_ != &reply; });
  threads_waiting_for_buffers_--;
  if (is_session_lost_) return;
  std::string error_text;
  try {
    if (due) {
      abandoned_replies_[reply_number] = {reply.destination_bytes, reply.needs_output_binding};
    } else if (reply.needs_output_binding && reply.kind == ReplyKind::Reply) {
      queue_unbound_outputs(reply_number, count_reply_outputs(reply.payload));
    }
    if (abandoned_replies_.size() > ABANDONED_REPLIES_MAX) {
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
  queue_unbound_outputs(reply_number, output_count);
}

void Connection::queue_unbound_outputs(uint64_t reply_number, uint32_t output_count) {
  if (output_count) unbound_outputs_.emplace_back(reply_number, output_count);
  bind_and_free_unbound_outputs();
}

// Binds outputs of discarded DynamicOps and frees them at once. Not during a recording, which would record
// that.
void Connection::bind_and_free_unbound_outputs() {
  if (recording_graph_ || is_session_lost_) return;
  while (!unbound_outputs_.empty()) {
    auto [number, count] = unbound_outputs_.back();
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
    unbound_outputs_.pop_back();
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
    while (received && read_buffer_end_ - read_buffer_start_ >= sizeof(ReplyHeader) && read_reply(0)) {
    }
  } catch (const ProtocolError& error) {
    mark_session_lost(std::string("protocol violation by the executor: ") + error.what());
  } catch (const std::exception& error) {
    mark_disconnected(error.what());
  }
  reading.unlock();
  std::vector<PendingFetch> completed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completed.swap(completed_fetches_);
    if (received || threads_waiting_for_reader_ > 0) state_changed_.notify_all();
  }
  drop_fetched_parcels(completed);
  return true;
}

bool Connection::fill_read_buffer(size_t needed_bytes, int64_t timeout_us) {
  while (read_buffer_end_ - read_buffer_start_ < needed_bytes) {
    if (read_buffer_start_ == read_buffer_end_) read_buffer_start_ = read_buffer_end_ = 0;
    if (read_buffer_.size() - read_buffer_start_ < needed_bytes) {
      std::memmove(read_buffer_.data(), read_buffer_.data() + read_buffer_start_,
                   read_buffer_end_ - read_buffer_start_);
      read_buffer_end_ -= read_buffer_start_;
      read_buffer_start_ = 0;
    }
    size_t space = read_buffer_.size() - read_buffer_end_;
    size_t got = stream_->read_spinning(read_buffer_.data() + read_buffer_end_, space, timeout_us,
                                        reply_spin_duration_us());
    if (got == 0) return false;
    read_buffer_end_ += got;
    update_last_received_time();
  }
  return true;
}

// A partial reply is kept, and the next call continues with it.
bool Connection::read_reply(int64_t timeout_us) {
  if (!incoming_reply_.is_header_received) {
    if (!fill_read_buffer(sizeof(ReplyHeader), timeout_us)) return false;
    ReplyHeader header;
    std::memcpy(&header, read_buffer_.data() + read_buffer_start_, sizeof header);
    read_buffer_start_ += sizeof header;
    if (header.kind == ReplyKind::Acknowledge) {
      if (header.bytes) throw ProtocolError("an acknowledgement has a payload");
      std::lock_guard<std::mutex> lock(mutex_);
      check_acknowledged_frame_count(header.frames_received);
      acknowledge_frames(header.frames_received);
      return true;
    }
    begin_reading_payload(header);
  }
  while (incoming_reply_.received_bytes < incoming_reply_.header.bytes) {
    if (!read_payload_part(timeout_us)) return false;
  }
  incoming_reply_.is_header_received = false;
  if (incoming_reply_.header.kind == ReplyKind::Fatal) {
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

void Connection::begin_reading_payload(const ReplyHeader& header) {
  if (header.kind != ReplyKind::Fatal && header.kind != ReplyKind::Reply && header.kind != ReplyKind::Error) {
    throw ProtocolError("a reply is of an unknown kind");
  }
  uint64_t destination_bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (header.kind != ReplyKind::Fatal && header.number > replies_requested_) {
      throw ProtocolError("a reply without a request");
    }
    auto found = pending_replies_.find(header.number);
    auto left = abandoned_replies_.find(header.number);
    if (found != pending_replies_.end()) destination_bytes = found->second->destination_bytes;
    if (left != abandoned_replies_.end()) destination_bytes = left->second.destination_bytes;
  }
  bool into = header.kind == ReplyKind::Reply && destination_bytes;
  if (into && header.bytes != destination_bytes) throw ProtocolError("a reply has an unexpected size");
  if (!into && header.bytes > BUFFERED_REPLY_BYTES_MAX) throw ProtocolError("a reply is larger than allowed");
  incoming_reply_ = {header, 0, into, true, {}};
  if (!into) incoming_reply_.payload.resize(header.bytes);
}

// Reads a part. A caller's memory is written to only while `reply_being_filled_` is set, so that the caller
// can stop waiting.
bool Connection::read_payload_part(int64_t timeout_us) {
  uint8_t* target = incoming_reply_.payload.data();
  uint64_t left = incoming_reply_.header.bytes - incoming_reply_.received_bytes;
  size_t here = std::min<size_t>(left, read_buffer_end_ - read_buffer_start_);
  if (incoming_reply_.goes_to_waiting_thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = pending_replies_.find(incoming_reply_.header.number);
    if (found != pending_replies_.end()) reply_being_filled_ = found->second;
    target = reply_being_filled_ ? static_cast<uint8_t*>(reply_being_filled_->destination) : nullptr;
  }
  struct ReplyFillGuard {
    Connection& connection;
    ~ReplyFillGuard() {
      std::lock_guard<std::mutex> lock(connection.mutex_);
      connection.reply_being_filled_ = nullptr;
      if (connection.threads_waiting_for_buffers_) connection.state_changed_.notify_all();
    }
  } filled{*this};
  if (here > 0) {
    if (target)
      std::memcpy(target + incoming_reply_.received_bytes, read_buffer_.data() + read_buffer_start_, here);
    read_buffer_start_ += here;
    incoming_reply_.received_bytes += here;
    return true;
  }
  size_t got = target ? stream_->read_spinning(target + incoming_reply_.received_bytes, left, timeout_us,
                                               reply_spin_duration_us())
                      : stream_->read_some(read_buffer_.data(), std::min<size_t>(left, READ_BUFFER_BYTES),
                                           timeout_us);  // discarded; the buffer is empty
  incoming_reply_.received_bytes += got;
  if (got) update_last_received_time();
  return got > 0;
}

void Connection::mark_lost_by_fatal_reply() {
  WireReader reader(incoming_reply_.payload.data(), incoming_reply_.payload.size());
  RemoteError error = read_remote_error(reader);
  mark_session_lost(to_ascii(error.message + " (" + error.code + ")"));
}

void Connection::deliver_reply() {
  const ReplyHeader& header = incoming_reply_.header;
  std::lock_guard<std::mutex> lock(mutex_);
  check_acknowledged_frame_count(header.frames_received);
  acknowledge_frames(header.frames_received);
  if (header.number != replies_received_ + 1) throw ProtocolError("a reply is missing or duplicated");
  replies_received_ = header.number;
  auto left = abandoned_replies_.find(header.number);
  if (left != abandoned_replies_.end()) {
    bool needs_output_binding = left->second.needs_output_binding && header.kind == ReplyKind::Reply;
    abandoned_replies_.erase(left);
    if (needs_output_binding)
      queue_unbound_outputs(header.number, count_reply_outputs(incoming_reply_.payload));
  }
  auto found = pending_replies_.find(header.number);
  if (found == pending_replies_.end()) return;
  PendingReply* reply = found->second;
  reply->payload = std::move(incoming_reply_.payload);
  reply->kind = header.kind;
  reply->is_done = true;
  pending_replies_.erase(found);
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
