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
constexpr size_t FRAME_TARGET_BYTES = 48u << 10;
constexpr size_t SPARE_BUFFER_BYTES_MAX = 2 * FRAME_TARGET_BYTES;
constexpr size_t SPARE_BUFFERS_MAX = 64;
constexpr size_t LARGE_SPARE_BUFFERS_MAX = 4;
// Uploads are split into frames of this size, so that the executor can copy the first while others are in
// flight.
constexpr uint64_t UPLOAD_FRAME_BYTES = 1u << 20;
// Up to this size an upload is copied into frames, and the caller does not wait.
constexpr uint64_t COPIED_UPLOAD_BYTES_MAX = 1u << 20;
constexpr int64_t SEND_SPIN_US = 5000;
constexpr int64_t SEND_WAIT_US_MAX = 50'000;
constexpr auto FLUSH_DELAY = std::chrono::microseconds(300);
constexpr auto CLOSE_POLL_INTERVAL = std::chrono::milliseconds(20);
constexpr auto IDLE_READ_INTERVAL = std::chrono::milliseconds(1000);
constexpr auto UNACKNOWLEDGED_READ_INTERVAL = std::chrono::milliseconds(50);
constexpr auto CLOSE_TIMEOUT = std::chrono::seconds(1);

// Every connection of the process, including those that only tensors hold. fork() waits for the mutex.
struct OpenConnections {
  std::mutex mutex;
  std::unordered_set<Connection*> connections;
};

OpenConnections& open_connections();

void before_fork() { open_connections().mutex.lock(); }

void after_fork() { open_connections().mutex.unlock(); }

void after_fork_in_child() {
  for (Connection* each : open_connections().connections)
    each->abandon_after_fork("it was opened before this process was forked");
  open_connections().mutex.unlock();
}

OpenConnections& open_connections() {
  static auto* connections = [] {
    ::pthread_atfork(&before_fork, &after_fork, &after_fork_in_child);
    return new OpenConnections();
  }();
  return *connections;
}

}  // namespace

Connection::Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, ResumeFunction resume,
                       FetchTokenFunction token)
    : options_(std::move(options)),
      resume_(std::move(resume)),
      fetch_token_(std::move(token)),
      templates_(CACHED_TEMPLATES_MAX),
      stream_(std::move(stream)),
      read_buffer_(READ_BUFFER_BYTES) {
  update_last_received_time();
  records_.append_uninitialized(sizeof(FrameHeader));
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

void Connection::raise_lost() const {
  std::string reason;
  if (is_abandoned_.load()) {
    reason = lost_reason_;
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    reason = lost_reason_;
  }
  raise("device.lost", options_.device_name + " (" + options_.executor + ") is lost: " + reason);
}

// --- writing records ----------------------------------------------------------------------------

Connection::LockedRecordWriter::LockedRecordWriter(Connection& connection) : connection_(connection) {
  if (connection_.is_lost()) connection_.raise_lost();
  lock_ = std::unique_lock<std::mutex>(connection_.mutex_);
  if (connection_.is_window_full_) wait_for_send_window();
  if (connection_.is_recording_) wait_for_other_recording_thread();
}

// The GIL is taken back without the lock, because other threads that hold the GIL may want the lock.
void Connection::LockedRecordWriter::wait_for_send_window() {
  while (connection_.is_window_full_) {
    lock_.unlock();
    {
      GilRelease release;
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.wait_until(waiting, [&] { return !connection_.is_window_full_; });
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
  if (connection_.is_recording_thread()) connection_.recorder_last_active_at_ = started;
  while (connection_.is_recording_ && !connection_.is_recording_thread()) {
    std::chrono::duration<double> idle =
        Clock::now() - std::max(started, connection_.recorder_last_active_at_.load());
    if (idle.count() > connection_.recorder_idle_s_max_) raise_recording_thread_idle();
    lock_.unlock();
    {
      GilRelease release;
      check_signals();
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.state_changed_.wait_for(waiting, SIGNAL_CHECK_INTERVAL,
                                          [&] { return !connection_.is_recording_ || connection_.is_lost_; });
    }
    if (connection_.is_lost()) connection_.raise_lost();
    lock_.lock();
  }
}

void Connection::LockedRecordWriter::raise_recording_thread_idle() {
  std::string recorder = connection_.recorder_name_;
  auto seconds = static_cast<int64_t>(connection_.recorder_idle_s_max_);
  lock_.unlock();
  raise("device.op_refused", "thread " + python_thread_name() + " cannot use " +
                                 connection_.options_.device_name + ": thread " + recorder +
                                 " is recording a captured model there, and has been idle for " +
                                 std::to_string(seconds) +
                                 " s. It may be waiting for this thread: a captured model must not run parts "
                                 "of itself on other threads, "
                                 "nor wait for a lock of a thread that uses the device");
}

void Connection::LockedRecordWriter::acquire() {
  if (connection_.is_lost()) connection_.raise_lost();
  lock_.lock();
  if (connection_.is_recording_) wait_for_other_recording_thread();
}

void Connection::LockedRecordWriter::check_storage_numbers_left(uint64_t count) {
  if (connection_.free_storage_numbers_.size() + (STORAGES_MAX - connection_.next_storage_number_) >= count)
    return;
  connection_.raise_too_many_storages();
}

uint32_t Connection::LockedRecordWriter::assign_storage_number() {
  uint32_t storage = connection_.next_free_storage_number();
  if (connection_.recording_graph_) connection_.graph_of_storage_[storage] = connection_.recording_graph_;
  return storage;
}

uint32_t Connection::next_free_storage_number() {
  if (!free_storage_numbers_.empty()) {
    uint32_t storage = free_storage_numbers_.back();
    free_storage_numbers_.pop_back();
    return storage;
  }
  if (next_storage_number_ >= STORAGES_MAX) raise_too_many_storages();
  return next_storage_number_++;
}

void Connection::raise_too_many_storages() const {
  raise("device.op_refused",
        options_.device_name + ": limit of " + std::to_string(STORAGES_MAX) + " tensors per session reached");
}

uint32_t Connection::LockedRecordWriter::assign_generator_number() {
  auto& free = connection_.free_generator_numbers_;
  if (!free.empty()) {
    uint32_t generator = free.back();
    free.pop_back();
    return generator;
  }
  if (connection_.next_generator_number_ >= GENERATORS_MAX) {
    raise("device.op_refused", connection_.options_.device_name + ": limit of " +
                                   std::to_string(GENERATORS_MAX) + " generators per session reached");
  }
  return connection_.next_generator_number_++;
}

void Connection::free_generator(uint32_t generator) noexcept {
  if (is_abandoned_ || is_lost()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (recording_graph_) {
    generators_to_free_.push_back(generator);
  } else {
    free_generator_now(generator);
  }
}

void Connection::free_generator_now(uint32_t generator) {
  records_.begin_record(RecordKind::FreeGenerator);
  records_.write_u32(generator);
  free_generator_numbers_.push_back(generator);
  pending_record_count_++;
}

void Connection::LockedRecordWriter::finish_record() {
  Connection& connection = connection_;
  if (++connection.pending_record_count_ >= connection.options_.ops_per_frame_max ||
      connection.records_.size() >= FRAME_TARGET_BYTES) {
    return finish_record_and_send_frame();
  }
  connection.counters_.ops++;
  if (connection.is_sender_asleep_ && !connection.deferred_flushes_) connection.wake_sender();
  lock_.unlock();
}

void Connection::LockedRecordWriter::finish_record_and_send_frame() {
  Connection& connection = connection_;
  connection.counters_.ops++;
  connection.seal_frame();
  lock_.unlock();
  connection.send_frames_nowait();
}

uint64_t Connection::LockedRecordWriter::finish_request(PendingReply& reply) {
  Connection& connection = connection_;
  uint64_t number = ++connection.replies_requested_;
  connection.pending_replies_[number] = &reply;
  connection.counters_.replies++;
  connection.seal_frame();
  lock_.unlock();
  connection.send_frames_nowait();
  return number;
}

void Connection::free_storage(uint32_t storage) noexcept {
  if (is_abandoned_.load(std::memory_order_acquire) || is_lost()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  records_.begin_record(RecordKind::Free);
  records_.write_u32(storage);
  auto graph = graph_of_storage_.empty() ? graph_of_storage_.end() : graph_of_storage_.find(storage);
  if (graph == graph_of_storage_.end()) {
    free_storage_numbers_.push_back(storage);
  } else {
    graph->second->freed_storages.push_back(storage);  // the graph keeps the number
  }
  pending_record_count_++;
  if (records_.size() < FRAME_TARGET_BYTES) {
    if (is_sender_asleep_) wake_sender();
    return;
  }
  seal_frame();
  lock.unlock();
  send_frames_nowait();
}

bool Connection::exceeds_send_window() const {
  return frames_.size() > UNACKNOWLEDGED_FRAMES_MAX || unacknowledged_bytes_ > UNACKNOWLEDGED_BYTES_MAX;
}

void Connection::wake_sender() {
  is_sender_asleep_ = false;
  state_changed_.notify_all();
}

// --- frames -------------------------------------------------------------------------------------

void Connection::seal_frame() {
  if (records_.size() == sizeof(FrameHeader)) return;
  queue_frame(FrameKind::Records, records_.data() + sizeof(FrameHeader),
              records_.size() - sizeof(FrameHeader), false);
  records_.clear();
  records_.append_uninitialized(sizeof(FrameHeader));
  pending_record_count_ = 0;
}

void Connection::queue_frame(FrameKind kind, const uint8_t* payload, uint64_t payload_bytes,
                             bool is_external_payload) {
  OutgoingFrame frame;
  auto& spares =
      payload_bytes > SPARE_BUFFER_BYTES_MAX && !is_external_payload ? large_spare_buffers_ : spare_buffers_;
  if (!spares.empty()) {
    frame.bytes = std::move(spares.back());
    spares.pop_back();
  }
  frame.number = ++frames_created_;
  FrameHeader header{static_cast<uint32_t>(payload_bytes), kind, frame.number,
                     replies_received_.load(std::memory_order_relaxed)};
  const auto* start = reinterpret_cast<const uint8_t*>(&header);
  frame.bytes.assign(start, start + sizeof header);
  if (is_external_payload) {
    frame.external_payload = payload;
    frame.external_bytes = payload_bytes;
  } else {
    frame.bytes.insert(frame.bytes.end(), payload, payload + payload_bytes);
  }
  unacknowledged_bytes_ += frame.bytes.size();
  counters_.frames++;
  frames_.push_back(std::move(frame));
  is_window_full_ = exceeds_send_window();
}

void Connection::send_frames_nowait() noexcept {
  std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
  try {
    if (sending && try_send_queued_frames()) return;
  } catch (const std::exception& error) {
    return mark_broken(error.what());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  wake_sender();
}

bool Connection::try_send_queued_frames() {
  for (;;) {
    OutgoingFrame* frame;
    const uint8_t* from;
    uint64_t count;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_broken_ || is_lost_ || first_unsent_frame_ >= frames_.size()) return true;
      frame = &frames_[first_unsent_frame_];  // stable: only sent frames are dropped, under this mutex
      size_t inside = frame->bytes.size();
      bool header = frame->sent_bytes < inside;
      from = header ? frame->bytes.data() + frame->sent_bytes
                    : frame->external_payload + (frame->sent_bytes - inside);
      count = header ? inside - frame->sent_bytes : frame->size() - frame->sent_bytes;
      frame_being_written_ = frame->number;
    }
    size_t sent = write_frame_bytes(from, count);
    std::lock_guard<std::mutex> lock(mutex_);
    frame->sent_bytes += sent;
    counters_.bytes_sent += sent;
    if (frame->sent_bytes == frame->size()) {
      first_unsent_frame_++;
      drop_acknowledged_frames(last_acknowledged_frame_);  // the acknowledgement may have come first
      if (first_unsent_frame_ == frames_.size()) state_changed_.notify_all();
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
      connection.frame_being_written_ = 0;
      if (connection.waiting_for_buffers_) connection.state_changed_.notify_all();
    }
  } written{*this};
  return stream_->write_some(data, size_bytes);
}

// Sends on this thread for a while: the sender thread would pause each time the socket is full. What takes
// longer is left to that thread.
void Connection::send_frames_up_to(uint64_t last_frame_number) {
  auto sent = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_broken_ || is_lost_ || first_unsent_frame_ >= frames_.size() ||
           frames_[first_unsent_frame_].number > last_frame_number;
  };
  auto until = Clock::now() + std::chrono::microseconds(std::min(reply_spin_duration_us(), SEND_SPIN_US));
  while (!sent()) {
    if (Clock::now() > until) return send_frames_nowait();
    try {
      std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
      if (!sending) return send_frames_nowait();
      try_send_queued_frames();
    } catch (const std::exception& error) {
      mark_broken(error.what());
    }
    try_read_replies(0);  // an executor that is busy replying does not read
  }
}

void Connection::drop_acknowledged_frames(uint64_t frames_received) {
  complete_fetches(frames_received);
  last_acknowledged_frame_ = std::max(last_acknowledged_frame_, frames_received);
  while (!frames_.empty() && first_unsent_frame_ > 0 && frames_.front().number <= frames_received) {
    OutgoingFrame& frame = frames_.front();
    unacknowledged_bytes_ -= frame.bytes.size();
    bool is_large = frame.bytes.capacity() > SPARE_BUFFER_BYTES_MAX;
    auto& spares = is_large ? large_spare_buffers_ : spare_buffers_;
    // Reused buffers have their pages mapped; page faults take longer than the copy.
    if (spares.size() < (is_large ? LARGE_SPARE_BUFFERS_MAX : SPARE_BUFFERS_MAX)) {
      spares.push_back(std::move(frame.bytes));
    }
    frames_.pop_front();
    first_unsent_frame_--;
  }
  if (is_window_full_) is_window_full_ = exceeds_send_window();
}

void Connection::flush() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_lost_) seal_frame();
  }
  send_frames_nowait();
}

void Connection::send_bytes(const std::function<void(WireWriter&)>& write_record, const void* data,
                            uint64_t size_bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  bool external_payload = size_bytes > COPIED_UPLOAD_BYTES_MAX;
  GilRelease release;
  uint64_t first, last;
  {
    LockedRecordWriter writer(*this);
    write_record(writer.records());
    seal_frame();
    first = frames_created_ + 1;
    for (uint64_t at = 0; at < size_bytes; at += UPLOAD_FRAME_BYTES) {
      queue_frame(FrameKind::Bytes, from + at, std::min(UPLOAD_FRAME_BYTES, size_bytes - at),
                  external_payload);
    }
    last = frames_created_;
    counters_.ops++;
  }
  send_frames_up_to(last);
  if (!external_payload) return;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(lock, [&] { return frames_.empty() || frames_.front().number > last; });
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
  waiting_for_buffers_++;
  state_changed_.wait(lock, [&] {
    bool all = true;
    for (OutgoingFrame& frame : frames_) {
      if (!frame.external_payload || frame.number < first_frame_number || frame.number > last_frame_number)
        continue;
      if (frame.number != frame_being_written_) frame.external_payload = zeros->data();
      all &= frame.external_payload == zeros->data();
    }
    return all;
  });
  waiting_for_buffers_--;
}

ConnectionCounters Connection::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  ConnectionCounters now = counters_;
  now.templates = templates_.template_count();
  now.storages = next_storage_number_ - 1 - free_storage_numbers_.size();
  return now;
}

// --- graphs -------------------------------------------------------------------------------------

void Connection::check_not_recording(const char* operation) const {
  if (is_recording_thread()) {
    raise("device.op_refused", std::string(operation) + " cannot be part of a captured graph");
  }
}

void Connection::track_storage_access_in_graph(uint32_t storage, const c10::Storage& c10_storage,
                                               bool is_written) {
  if (!is_recording_thread()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_graph_) return;
  auto owner = graph_of_storage_.find(storage);
  if (owner != graph_of_storage_.end() && owner->second == recording_graph_) return;
  recording_graph_->used_storages.emplace(storage, c10_storage);
  if (is_written) recording_graph_->written_storages.insert(storage);
}

Connection::StorageAccess Connection::storage_access_in_graph(uint32_t graph, uint32_t storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(graph);
  if (found == graphs_.end() || !found->second->used_storages.contains(storage)) return StorageAccess::Unused;
  return found->second->written_storages.contains(storage) ? StorageAccess::Written : StorageAccess::Read;
}

size_t Connection::graph_written_storage_count(uint32_t graph) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(graph);
  return found == graphs_.end() ? 0 : found->second->written_storages.size();
}

bool Connection::is_created_by_recording(uint32_t storage) const {
  if (!is_recording_thread()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  auto owner = graph_of_storage_.find(storage);
  return owner != graph_of_storage_.end() && owner->second == recording_graph_;
}

uint32_t Connection::begin_graph(const std::string& thread_name, double recorder_idle_s_max) {
  check_not_recording("another graph");
  LockedRecordWriter writer(*this);
  if (free_graph_numbers_.empty() && next_graph_number_ >= GRAPHS_MAX) {
    raise("device.op_refused",
          options_.device_name + ": limit of " + std::to_string(GRAPHS_MAX) + " graphs reached");
  }
  if (free_graph_numbers_.empty()) free_graph_numbers_.push_back(next_graph_number_++);
  recording_graph_number_ = free_graph_numbers_.back();
  free_graph_numbers_.pop_back();
  auto& made = graphs_[recording_graph_number_] = std::make_unique<GraphStorages>();
  recording_graph_ = made.get();
  recorder_thread_id_ = std::this_thread::get_id();
  recorder_last_active_at_ = Clock::now();
  recorder_name_ = thread_name;
  recorder_idle_s_max_ = recorder_idle_s_max;
  is_recording_ = true;
  records_.begin_record(RecordKind::GraphBegin);
  records_.write_u32(recording_graph_number_);
  writer.finish_record();
  return recording_graph_number_;
}

void Connection::end_graph(uint32_t action) {
  uint32_t number;
  std::vector<uint32_t> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_graph_) return;
    records_.begin_record(RecordKind::GraphEnd, action);
    number = recording_graph_number_;
    recording_graph_ = nullptr;
    is_recording_ = false;
    for (uint32_t generator : generators_to_free_) free_generator_now(generator);
    generators_to_free_.clear();
    waiting.swap(graphs_to_free_);
    free_unbound_outputs();
    state_changed_.notify_all();
  }
  if (action == GRAPH_DISCARD) forget_freed_graph(number);
  for (uint32_t graph : waiting) free_graph(graph);
}

// Sent at once: it is much work for the executor, so batching has no benefit.
void Connection::replay_graph(uint32_t graph) {
  check_not_recording("a replay");
  LockedRecordWriter writer(*this);
  records_.begin_record(RecordKind::GraphReplay);
  records_.write_u32(graph);
  writer.finish_record_and_send_frame();
}

uint32_t Connection::copy_graph_result(uint32_t result_storage) {
  LockedRecordWriter writer(*this);
  auto graph = graph_of_storage_.find(result_storage);
  if (graph == graph_of_storage_.end() || recording_graph_) {
    writer.release();
    return 0;
  }
  uint32_t taken = writer.assign_storage_number();
  records_.begin_record(RecordKind::GraphResult);
  records_.write_u32(result_storage);
  records_.write_u32(taken);
  writer.finish_record();
  return taken;
}

void Connection::free_graph(uint32_t graph) noexcept {
  if (is_abandoned_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recording_graph_) {  // not allowed within a recording
      graphs_to_free_.push_back(graph);
      return;
    }
    if (!is_lost_) {
      records_.begin_record(RecordKind::GraphFree);
      records_.write_u32(graph);
      pending_record_count_++;
    }
  }
  forget_freed_graph(graph);
}

// Frees its numbers, and the storages it used: after the lock is released, because freeing takes the lock.
void Connection::forget_freed_graph(uint32_t graph_number) {
  std::unique_ptr<GraphStorages> graph;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(graph_number);
  if (found == graphs_.end()) return;
  graph = std::move(found->second);
  graphs_.erase(found);
  std::erase_if(graph_of_storage_, [&](const auto& each) { return each.second == graph.get(); });
  free_storage_numbers_.insert(free_storage_numbers_.end(), graph->freed_storages.begin(),
                               graph->freed_storages.end());
  free_graph_numbers_.push_back(graph_number);
}

// --- the sender thread --------------------------------------------------------------------------

void Connection::sender_loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_stopping_) {
    if (is_lost_) {
      state_changed_.wait(lock, [&] { return is_stopping_; });
      break;
    }
    if (is_broken_) {
      lock.unlock();
      resume_connection();
      lock.lock();
      continue;
    }
    bool unsent = first_unsent_frame_ < frames_.size();
    if (unsent || records_.size() > sizeof(FrameHeader)) {
      // More records may join an incomplete frame.
      if (!unsent) state_changed_.wait_for(lock, FLUSH_DELAY, [&] { return is_stopping_ || is_broken_; });
      if (!unsent) seal_frame();
      lock.unlock();
      bool full = false;
      try {
        std::lock_guard<std::mutex> sending(send_mutex_);
        full = !try_send_queued_frames() && !stream_->wait_writable(SEND_WAIT_US_MAX);
      } catch (const std::exception& error) {
        mark_broken(error.what());
      }
      if (full) try_read_replies(0);  // an executor that is busy replying does not read
      lock.lock();
    } else {
      is_sender_asleep_ = true;
      auto woken = [&] { return !is_sender_asleep_ || is_stopping_ || is_broken_ || is_lost_; };
      bool idle = !state_changed_.wait_for(
          lock, frames_.empty() ? IDLE_READ_INTERVAL : UNACKNOWLEDGED_READ_INTERVAL, woken);
      is_sender_asleep_ = false;
      if (!idle) continue;
      lock.unlock();
      try_read_replies(0);  // detects a lost connection before the executor drops the session
      lock.lock();
    }
  }
}

void Connection::mark_broken(const std::string& why) noexcept {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_broken_ || is_lost_) return;
    is_broken_ = true;
    broken_reason_ = why;
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
    if (is_stopping_ || is_lost_) return;
    why = broken_reason_;
  }
  ResumeResult resumed;
  try {
    resumed = resume_(replies_received_);
  } catch (const std::exception& error) {
    mark_lost(why + "; " + error.what());
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (resumed.frames_received > frames_created_) {
    lock.unlock();
    mark_lost("the executor acknowledged frames that were never sent");
    return;
  }
  stream_ = resumed.stream;
  read_start_ = read_end_ = 0;
  incoming_reply_ = {};
  first_unsent_frame_ = frames_.size();
  drop_acknowledged_frames(resumed.frames_received);
  for (OutgoingFrame& frame : frames_) frame.sent_bytes = 0;
  first_unsent_frame_ = 0;
  is_broken_ = false;
  update_last_received_time();
  counters_.resumes++;
  if (is_stopping_) stream_->shut_down();
  state_changed_.notify_all();
}

void Connection::mark_lost(const std::string& reason) noexcept {
  std::shared_ptr<Stream> stream;
  std::vector<PendingFetch> completed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_lost_) return;
    lost_reason_ = reason;
    is_lost_ = true;
    stream = stream_;
    complete_fetches(frames_created_);
    completed.swap(completed_fetches_);
    state_changed_.notify_all();
  }
  if (stream) stream->shut_down();
  drop_fetched_parcels(completed);
}

// --- the end ------------------------------------------------------------------------------------

void Connection::close(const std::string& reason) {
  if (is_abandoned_) return;
  GilRelease release;
  bool graceful;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    graceful = !is_lost_ && !is_broken_ && !is_stopping_;
    if (graceful) {
      records_.begin_record(RecordKind::CloseSession);
      seal_frame();
    }
    is_stopping_ = true;
    state_changed_.notify_all();
  }
  if (sender_thread_.joinable()) sender_thread_.join();
  if (graceful) flush_and_wait_for_remote_close();
  mark_lost(reason);
  std::scoped_lock all(send_mutex_, read_mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  frames_.clear();
  first_unsent_frame_ = 0;
  templates_.clear();
  spare_buffers_.clear();
  large_spare_buffers_.clear();
  stream_.reset();
}

// The executor closes the connection when it has received CloseSession. Closing earlier could lose data in
// flight.
void Connection::flush_and_wait_for_remote_close() noexcept {
  auto deadline = Clock::now() + CLOSE_TIMEOUT;
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
  while (!is_broken_ && !is_lost_ && remaining_us()) {
    lock.unlock();
    bool is_reader = try_read_replies(remaining_us());
    lock.lock();
    if (!is_reader) state_changed_.wait_for(lock, CLOSE_POLL_INTERVAL);
  }
}

void Connection::abandon_after_fork(const std::string& reason) noexcept {
  // The thread and the socket belong to the parent, so they are left alone. The object is never destroyed in
  // the child, because nothing would wake the waiters of its condition variable.
  c10::raw::intrusive_ptr::incref(this);
  lost_reason_ = reason;
  is_lost_ = true;
  is_abandoned_ = true;
}

}  // namespace genie
