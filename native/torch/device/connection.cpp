// See connection.h.
#include "connection.h"

#include <algorithm>
#include <chrono>
#include <unordered_set>

#include <pthread.h>

#include "errors.h"
#include "interrupts.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t CACHED_TEMPLATES_MAX = 16384;
constexpr size_t RECORDS_FRAME_TARGET_BYTES = 48u << 10;
constexpr size_t SPARE_FRAME_BUFFER_BYTES_MAX = 2 * RECORDS_FRAME_TARGET_BYTES;
constexpr size_t SPARE_FRAME_BUFFERS_MAX = 64;
constexpr size_t LARGE_SPARE_FRAME_BUFFERS_MAX = 4;
// Uploads are split into frames of this size, so that the executor can copy the first while others are in
// flight.
constexpr uint64_t UPLOAD_FRAME_BYTES = 1u << 20;
// Up to this size an upload is copied into frames, and the caller does not wait.
constexpr uint64_t COPIED_UPLOAD_BYTES_MAX = 1u << 20;
constexpr int64_t SEND_ON_CALLER_THREAD_US_MAX = 5000;
constexpr int64_t SOCKET_WRITABLE_WAIT_US_MAX = 50'000;
constexpr auto INCOMPLETE_FRAME_DELAY = std::chrono::microseconds(300);
constexpr auto REMOTE_CLOSE_POLL_INTERVAL = std::chrono::milliseconds(20);
constexpr auto IDLE_READ_INTERVAL = std::chrono::milliseconds(1000);
constexpr auto UNACKNOWLEDGED_READ_INTERVAL = std::chrono::milliseconds(50);
constexpr auto REMOTE_CLOSE_TIMEOUT = std::chrono::seconds(1);

// Every connection of the process, including those that only tensors hold. fork() waits for the mutex.
struct OpenConnections {
  std::mutex mutex;
  std::unordered_set<Connection*> connections;
};

OpenConnections& open_connections();

void lock_connections_before_fork() { open_connections().mutex.lock(); }

void unlock_connections_after_fork() { open_connections().mutex.unlock(); }

void abandon_connections_in_child() {
  for (Connection* each : open_connections().connections)
    each->abandon_after_fork("it was opened before this process was forked");
  open_connections().mutex.unlock();
}

OpenConnections& open_connections() {
  static auto* connections = [] {
    ::pthread_atfork(&lock_connections_before_fork, &unlock_connections_after_fork,
                     &abandon_connections_in_child);
    return new OpenConnections();
  }();
  return *connections;
}

}  // namespace

Connection::Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, ResumeFunction resume,
                       FetchTokenFunction token)
    : options_(std::move(options)),
      resume_function_(std::move(resume)),
      fetch_token_function_(std::move(token)),
      templates_(CACHED_TEMPLATES_MAX),
      stream_(std::move(stream)),
      read_buffer_(READ_BUFFER_BYTES) {
  update_last_received_time();
  next_frame_records_.append_uninitialized(sizeof(FrameHeader));
  sender_thread_ = std::thread([this] { sender_loop(); });
  std::lock_guard<std::mutex> lock(open_connections().mutex);
  open_connections().connections.insert(this);
}

Connection::~Connection() {
  close("the connection is no longer used");
  std::lock_guard<std::mutex> lock(open_connections().mutex);
  open_connections().connections.erase(this);
}

void Connection::update_last_received_time() { last_received_at_ = Clock::now(); }

void Connection::raise_session_lost() const {
  std::string reason;
  if (is_abandoned_after_fork_.load()) {
    reason = session_lost_reason_;
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    reason = session_lost_reason_;
  }
  raise_python_error("device.lost",
                     options_.device_name + " (" + options_.executor_description + ") is lost: " + reason);
}

// --- writing records ----------------------------------------------------------------------------

Connection::LockedRecordWriter::LockedRecordWriter(Connection& connection) : connection_(connection) {
  if (connection_.is_session_lost()) connection_.raise_session_lost();
  lock_ = std::unique_lock<std::mutex>(connection_.mutex_);
  if (connection_.is_send_window_full_) wait_for_send_window();
  if (connection_.is_recording_) wait_for_other_recording_thread();
}

// The GIL is taken back without the lock, because other threads that hold the GIL may want the lock.
void Connection::LockedRecordWriter::wait_for_send_window() {
  while (connection_.is_send_window_full_) {
    lock_.unlock();
    {
      GilRelease release;
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.wait_until(waiting, [&] { return !connection_.is_send_window_full_; });
      waiting.unlock();
    }
    lock_.lock();
  }
}

// Ops of other threads must not be recorded, so they wait until the recording ends. The recorder may in turn
// wait for one of them (a lock, or a part of the model that runs there), which would be a deadlock; hence the
// idle limit.
void Connection::LockedRecordWriter::wait_for_other_recording_thread() {
  auto started = Clock::now();
  if (connection_.is_recording_thread()) connection_.recording_thread_active_at_ = started;
  while (connection_.is_recording_ && !connection_.is_recording_thread()) {
    std::chrono::duration<double> idle =
        Clock::now() - std::max(started, connection_.recording_thread_active_at_.load());
    if (idle.count() > connection_.recording_thread_idle_s_max_) raise_recording_thread_idle();
    lock_.unlock();
    {
      GilRelease release;
      run_pending_signal_handlers();
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.state_changed_.wait_for(waiting, SIGNAL_CHECK_INTERVAL, [&] {
        return !connection_.is_recording_ || connection_.is_session_lost_;
      });
    }
    if (connection_.is_session_lost()) connection_.raise_session_lost();
    lock_.lock();
  }
}

void Connection::LockedRecordWriter::raise_recording_thread_idle() {
  std::string recorder = connection_.recording_thread_name_;
  auto seconds = static_cast<int64_t>(connection_.recording_thread_idle_s_max_);
  lock_.unlock();
  raise_python_error("device.op_refused",
                     "thread " + python_thread_name() + " cannot use " + connection_.options_.device_name +
                         ": thread " + recorder +
                         " is recording a captured model there, and has been idle for " +
                         std::to_string(seconds) +
                         " s. It may be waiting for this thread: a captured model must not run parts "
                         "of itself on other threads, "
                         "nor wait for a lock of a thread that uses the device");
}

void Connection::LockedRecordWriter::lock_again() {
  if (connection_.is_session_lost()) connection_.raise_session_lost();
  lock_.lock();
  if (connection_.is_recording_) wait_for_other_recording_thread();
}

void Connection::LockedRecordWriter::check_storage_numbers_left(uint64_t count) {
  if (connection_.storage_numbers_.unassigned_count() < count) connection_.raise_too_many_storages();
}

uint32_t Connection::LockedRecordWriter::assign_storage_number() {
  uint32_t storage = connection_.assign_storage_number();
  if (connection_.recording_graph_)
    connection_.graph_by_created_storage_[storage] = connection_.recording_graph_;
  return storage;
}

uint32_t Connection::assign_storage_number() {
  if (storage_numbers_.unassigned_count() == 0) raise_too_many_storages();
  return storage_numbers_.assign();
}

void Connection::raise_too_many_storages() const {
  raise_python_error("device.op_refused", options_.device_name + ": limit of " +
                                              std::to_string(STORAGES_MAX) + " tensors per session reached");
}

uint32_t Connection::LockedRecordWriter::assign_generator_number() {
  if (connection_.generator_numbers_.unassigned_count() == 0) {
    raise_python_error("device.op_refused", connection_.options_.device_name + ": limit of " +
                                                std::to_string(GENERATORS_MAX) +
                                                " generators per session reached");
  }
  return connection_.generator_numbers_.assign();
}

void Connection::free_generator(uint32_t generator) noexcept {
  if (is_abandoned_after_fork_ || is_session_lost()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (recording_graph_) {
    generators_to_free_after_recording_.push_back(generator);
  } else {
    write_free_generator(generator);
  }
}

void Connection::write_free_generator(uint32_t generator) {
  next_frame_records_.begin_record(RecordKind::FreeGenerator);
  next_frame_records_.write_u32(generator);
  generator_numbers_.free(generator);
  next_frame_record_count_++;
}

void Connection::LockedRecordWriter::finish_record() {
  Connection& connection = connection_;
  if (++connection.next_frame_record_count_ >= connection.options_.ops_per_frame_max ||
      connection.next_frame_records_.size() >= RECORDS_FRAME_TARGET_BYTES) {
    return finish_record_and_send_frame();
  }
  connection.counters_.ops++;
  if (connection.is_sender_thread_asleep_ && !connection.deferred_flush_count_)
    connection.wake_sender_thread();
  lock_.unlock();
}

void Connection::LockedRecordWriter::finish_record_and_send_frame() {
  Connection& connection = connection_;
  connection.counters_.ops++;
  connection.queue_records_as_frame();
  lock_.unlock();
  connection.send_frames_nowait();
}

uint64_t Connection::LockedRecordWriter::finish_record_and_request_reply(PendingReply& reply) {
  Connection& connection = connection_;
  uint64_t number = ++connection.replies_requested_;
  connection.pending_replies_[number] = &reply;
  connection.counters_.replies++;
  connection.queue_records_as_frame();
  lock_.unlock();
  connection.send_frames_nowait();
  return number;
}

void Connection::free_storage(uint32_t storage) noexcept {
  if (is_abandoned_after_fork_.load(std::memory_order_acquire) || is_session_lost()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  next_frame_records_.begin_record(RecordKind::Free);
  next_frame_records_.write_u32(storage);
  auto graph = graph_by_created_storage_.empty() ? graph_by_created_storage_.end()
                                                 : graph_by_created_storage_.find(storage);
  if (graph == graph_by_created_storage_.end()) {
    storage_numbers_.free(storage);
  } else {
    graph->second->freed_created_storages.push_back(storage);  // the graph keeps the number
  }
  next_frame_record_count_++;
  if (next_frame_records_.size() < RECORDS_FRAME_TARGET_BYTES) {
    if (is_sender_thread_asleep_) wake_sender_thread();
    return;
  }
  queue_records_as_frame();
  lock.unlock();
  send_frames_nowait();
}

bool Connection::exceeds_send_window() const {
  return unacknowledged_frames_.size() > UNACKNOWLEDGED_FRAMES_MAX ||
         unacknowledged_bytes_ > UNACKNOWLEDGED_BYTES_MAX;
}

void Connection::wake_sender_thread() {
  is_sender_thread_asleep_ = false;
  state_changed_.notify_all();
}

// --- frames -------------------------------------------------------------------------------------

void Connection::queue_records_as_frame() {
  if (next_frame_records_.size() == sizeof(FrameHeader)) return;
  queue_frame(FrameKind::Records, next_frame_records_.data() + sizeof(FrameHeader),
              next_frame_records_.size() - sizeof(FrameHeader), false);
  next_frame_records_.clear();
  next_frame_records_.append_uninitialized(sizeof(FrameHeader));
  next_frame_record_count_ = 0;
}

void Connection::queue_frame(FrameKind kind, const uint8_t* payload, uint64_t payload_bytes,
                             bool is_external_payload) {
  OutgoingFrame frame;
  auto& spares = payload_bytes > SPARE_FRAME_BUFFER_BYTES_MAX && !is_external_payload
                     ? large_spare_frame_buffers_
                     : spare_frame_buffers_;
  if (!spares.empty()) {
    frame.bytes = std::move(spares.back());
    spares.pop_back();
  }
  frame.number = ++created_frame_count_;
  FrameHeader header{static_cast<uint32_t>(payload_bytes), kind, frame.number,
                     replies_received_.load(std::memory_order_relaxed)};
  const auto* start = reinterpret_cast<const uint8_t*>(&header);
  frame.bytes.assign(start, start + sizeof header);
  if (is_external_payload) {
    frame.external_payload = payload;
    frame.external_payload_bytes = payload_bytes;
  } else {
    frame.bytes.insert(frame.bytes.end(), payload, payload + payload_bytes);
  }
  unacknowledged_bytes_ += frame.bytes.size();
  counters_.frames++;
  unacknowledged_frames_.push_back(std::move(frame));
  is_send_window_full_ = exceeds_send_window();
}

void Connection::send_frames_nowait() noexcept {
  std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
  try {
    if (sending && try_send_queued_frames()) return;
  } catch (const std::exception& error) {
    return mark_disconnected(error.what());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  wake_sender_thread();
}

bool Connection::try_send_queued_frames() {
  for (;;) {
    OutgoingFrame* frame;
    const uint8_t* from;
    uint64_t count;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_disconnected_ || is_session_lost_ || first_unsent_frame_index_ >= unacknowledged_frames_.size())
        return true;
      frame = &unacknowledged_frames_[first_unsent_frame_index_];  // stable: only sent frames are dropped,
                                                                   // under this mutex
      size_t inside = frame->bytes.size();
      bool header = frame->sent_bytes < inside;
      from = header ? frame->bytes.data() + frame->sent_bytes
                    : frame->external_payload + (frame->sent_bytes - inside);
      count = header ? inside - frame->sent_bytes : frame->size() - frame->sent_bytes;
      frame_number_being_written_ = frame->number;
    }
    size_t sent = write_frame_bytes(from, count);
    std::lock_guard<std::mutex> lock(mutex_);
    frame->sent_bytes += sent;
    counters_.bytes_sent += sent;
    if (frame->sent_bytes == frame->size()) {
      first_unsent_frame_index_++;
      drop_acknowledged_frames(last_acknowledged_frame_number_);  // the acknowledgement may have come first
      if (first_unsent_frame_index_ == unacknowledged_frames_.size()) state_changed_.notify_all();
    } else if (sent == 0) {
      return false;
    }
  }
}

size_t Connection::write_frame_bytes(const uint8_t* data, uint64_t size_bytes) {
  struct FrameWriteGuard {
    Connection& connection;
    ~FrameWriteGuard() {
      std::lock_guard<std::mutex> lock(connection.mutex_);
      connection.frame_number_being_written_ = 0;
      if (connection.threads_waiting_for_buffers_) connection.state_changed_.notify_all();
    }
  } written{*this};
  return stream_->write_some(data, size_bytes);
}

// Sends on this thread for a while: the sender thread would pause each time the socket is full. What takes
// longer is left to that thread.
void Connection::send_frames_up_to(uint64_t last_frame_number) {
  auto sent = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_disconnected_ || is_session_lost_ ||
           first_unsent_frame_index_ >= unacknowledged_frames_.size() ||
           unacknowledged_frames_[first_unsent_frame_index_].number > last_frame_number;
  };
  auto until = Clock::now() +
               std::chrono::microseconds(std::min(reply_spin_duration_us(), SEND_ON_CALLER_THREAD_US_MAX));
  while (!sent()) {
    if (Clock::now() > until) return send_frames_nowait();
    try {
      std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
      if (!sending) return send_frames_nowait();
      try_send_queued_frames();
    } catch (const std::exception& error) {
      mark_disconnected(error.what());
    }
    try_read_replies_as_reader(0);  // an executor that is busy replying does not read
  }
}

void Connection::drop_acknowledged_frames(uint64_t frames_received) {
  move_completed_fetches(frames_received);
  last_acknowledged_frame_number_ = std::max(last_acknowledged_frame_number_, frames_received);
  while (!unacknowledged_frames_.empty() && first_unsent_frame_index_ > 0 &&
         unacknowledged_frames_.front().number <= frames_received) {
    OutgoingFrame& frame = unacknowledged_frames_.front();
    unacknowledged_bytes_ -= frame.bytes.size();
    bool is_large = frame.bytes.capacity() > SPARE_FRAME_BUFFER_BYTES_MAX;
    auto& spares = is_large ? large_spare_frame_buffers_ : spare_frame_buffers_;
    // Reused buffers have their pages mapped; page faults take longer than the copy.
    if (spares.size() < (is_large ? LARGE_SPARE_FRAME_BUFFERS_MAX : SPARE_FRAME_BUFFERS_MAX)) {
      spares.push_back(std::move(frame.bytes));
    }
    unacknowledged_frames_.pop_front();
    first_unsent_frame_index_--;
  }
  if (is_send_window_full_) is_send_window_full_ = exceeds_send_window();
}

void Connection::flush() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_session_lost_) queue_records_as_frame();
  }
  send_frames_nowait();
}

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
    first = created_frame_count_ + 1;
    for (uint64_t at = 0; at < size_bytes; at += UPLOAD_FRAME_BYTES) {
      queue_frame(FrameKind::Bytes, from + at, std::min(UPLOAD_FRAME_BYTES, size_bytes - at),
                  external_payload);
    }
    last = created_frame_count_;
    counters_.ops++;
  }
  send_frames_up_to(last);
  if (!external_payload) return;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(
        lock, [&] { return unacknowledged_frames_.empty() || unacknowledged_frames_.front().number > last; });
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    replace_external_payloads_with_zeros(first, last);
    throw;
  }
}

// Replaces external payloads of frames, because their owner stops waiting. The executor expects the announced
// number of bytes, and gets zeros for the rest.
void Connection::replace_external_payloads_with_zeros(uint64_t first_frame_number,
                                                      uint64_t last_frame_number) {
  static const auto* zeros = new std::vector<uint8_t>(FRAME_BYTES_MAX);
  std::unique_lock<std::mutex> lock(mutex_);
  threads_waiting_for_buffers_++;
  state_changed_.wait(lock, [&] {
    bool all = true;
    for (OutgoingFrame& frame : unacknowledged_frames_) {
      if (!frame.external_payload || frame.number < first_frame_number || frame.number > last_frame_number)
        continue;
      if (frame.number != frame_number_being_written_) frame.external_payload = zeros->data();
      all &= frame.external_payload == zeros->data();
    }
    return all;
  });
  threads_waiting_for_buffers_--;
}

ConnectionCounters Connection::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  ConnectionCounters now = counters_;
  now.templates = templates_.template_count();
  now.storages = storage_numbers_.assigned_count();
  return now;
}

// --- the sender thread --------------------------------------------------------------------------

void Connection::sender_loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_closing_) {
    if (is_session_lost_) {
      state_changed_.wait(lock, [&] { return is_closing_; });
      break;
    }
    if (is_disconnected_) {
      lock.unlock();
      resume_connection();
      lock.lock();
      continue;
    }
    bool unsent = first_unsent_frame_index_ < unacknowledged_frames_.size();
    if (unsent || next_frame_records_.size() > sizeof(FrameHeader)) {
      // More records may join an incomplete frame.
      if (!unsent)
        state_changed_.wait_for(lock, INCOMPLETE_FRAME_DELAY,
                                [&] { return is_closing_ || is_disconnected_; });
      if (!unsent) queue_records_as_frame();
      lock.unlock();
      bool full = false;
      try {
        std::lock_guard<std::mutex> sending(send_mutex_);
        full = !try_send_queued_frames() && !stream_->wait_writable(SOCKET_WRITABLE_WAIT_US_MAX);
      } catch (const std::exception& error) {
        mark_disconnected(error.what());
      }
      if (full) try_read_replies_as_reader(0);  // an executor that is busy replying does not read
      lock.lock();
    } else {
      is_sender_thread_asleep_ = true;
      auto woken = [&] {
        return !is_sender_thread_asleep_ || is_closing_ || is_disconnected_ || is_session_lost_;
      };
      bool idle = !state_changed_.wait_for(
          lock, unacknowledged_frames_.empty() ? IDLE_READ_INTERVAL : UNACKNOWLEDGED_READ_INTERVAL, woken);
      is_sender_thread_asleep_ = false;
      if (!idle) continue;
      lock.unlock();
      try_read_replies_as_reader(0);  // detects a lost connection before the executor drops the session
      lock.lock();
    }
  }
}

void Connection::mark_disconnected(const std::string& why) noexcept {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_disconnected_ || is_session_lost_) return;
    is_disconnected_ = true;
    disconnect_reason_ = why;
    stream = stream_;
    state_changed_.notify_all();
  }
  if (stream) stream->shut_down();
}

void Connection::resume_connection() {
  std::scoped_lock quiet(send_mutex_, read_mutex_);
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_closing_ || is_session_lost_) return;
    why = disconnect_reason_;
  }
  ResumeResult resumed;
  try {
    resumed = resume_function_(replies_received_);
  } catch (const std::exception& error) {
    mark_session_lost(why + "; " + error.what());
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (resumed.frames_received > created_frame_count_) {
    lock.unlock();
    mark_session_lost("the executor acknowledged frames that were never sent");
    return;
  }
  stream_ = resumed.stream;
  read_buffer_start_ = read_buffer_end_ = 0;
  incoming_reply_ = {};
  first_unsent_frame_index_ = unacknowledged_frames_.size();
  drop_acknowledged_frames(resumed.frames_received);
  for (OutgoingFrame& frame : unacknowledged_frames_) frame.sent_bytes = 0;
  first_unsent_frame_index_ = 0;
  is_disconnected_ = false;
  update_last_received_time();
  counters_.resumes++;
  if (is_closing_) stream_->shut_down();
  state_changed_.notify_all();
}

void Connection::mark_session_lost(const std::string& reason) noexcept {
  std::shared_ptr<Stream> stream;
  std::vector<PendingFetch> completed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_session_lost_) return;
    session_lost_reason_ = reason;
    is_session_lost_ = true;
    stream = stream_;
    move_completed_fetches(created_frame_count_);
    completed.swap(completed_fetches_);
    state_changed_.notify_all();
  }
  if (stream) stream->shut_down();
  drop_fetched_parcels(completed);
}

// --- the end ------------------------------------------------------------------------------------

void Connection::close(const std::string& reason) {
  if (is_abandoned_after_fork_) return;
  GilRelease release;
  bool graceful;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    graceful = !is_session_lost_ && !is_disconnected_ && !is_closing_;
    if (graceful) {
      next_frame_records_.begin_record(RecordKind::CloseSession);
      queue_records_as_frame();
    }
    is_closing_ = true;
    state_changed_.notify_all();
  }
  if (sender_thread_.joinable()) sender_thread_.join();
  if (graceful) flush_and_wait_for_remote_close();
  mark_session_lost(reason);
  std::scoped_lock all(send_mutex_, read_mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  unacknowledged_frames_.clear();
  first_unsent_frame_index_ = 0;
  templates_.clear();
  spare_frame_buffers_.clear();
  large_spare_frame_buffers_.clear();
  stream_.reset();
}

// The executor closes the connection when it has received CloseSession. Closing earlier could lose data in
// flight.
void Connection::flush_and_wait_for_remote_close() noexcept {
  auto deadline = Clock::now() + REMOTE_CLOSE_TIMEOUT;
  auto remaining_us = [&] {
    return std::max<int64_t>(
        0, std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count());
  };
  try {
    std::lock_guard<std::mutex> sending(send_mutex_);
    while (!try_send_queued_frames() && remaining_us()) stream_->wait_writable(remaining_us());
  } catch (const std::exception&) {
    return;  // the executor closed first
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_disconnected_ && !is_session_lost_ && remaining_us()) {
    lock.unlock();
    bool is_reader = try_read_replies_as_reader(remaining_us());
    lock.lock();
    if (!is_reader) state_changed_.wait_for(lock, REMOTE_CLOSE_POLL_INTERVAL);
  }
}

void Connection::abandon_after_fork(const std::string& reason) noexcept {
  // The thread and the socket belong to the parent, so they are left alone. The object is never destroyed in
  // the child, because nothing would wake the waiters of its condition variable.
  c10::raw::intrusive_ptr::incref(this);
  session_lost_reason_ = reason;
  is_session_lost_ = true;
  is_abandoned_after_fork_ = true;
}

}  // namespace genie
