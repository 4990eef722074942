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

constexpr uint32_t TEMPLATES_KEPT_MAX = 16384;
constexpr size_t SEAL_BYTES = 48u << 10;
constexpr size_t SPARE_BYTES_MAX = 2 * SEAL_BYTES;
constexpr size_t SPARE_BUFFERS_MAX = 64;
constexpr size_t LARGE_SPARE_BUFFERS_MAX = 4;
// Uploads are split into frames of this size, so that the executor can copy the first while others are in
// flight.
constexpr uint64_t UPLOAD_FRAME_BYTES = 1u << 20;
// Up to this size an upload is copied into frames, and the caller does not wait.
constexpr uint64_t COPIED_UPLOAD_BYTES_MAX = 1u << 20;
constexpr int64_t SEND_SPIN_US = 5000;
constexpr int64_t SEND_SLICE_US = 50'000;
constexpr auto FLUSH_DELAY = std::chrono::microseconds(300);
constexpr auto CLOSE_POLL_INTERVAL = std::chrono::milliseconds(20);
constexpr auto IDLE_READ_INTERVAL = std::chrono::milliseconds(1000);
constexpr auto UNACKNOWLEDGED_READ_INTERVAL = std::chrono::milliseconds(50);
constexpr auto CLOSE_TIMEOUT = std::chrono::seconds(1);

// Every connection of the process, including those that only tensors hold. fork() waits for the mutex.
struct OpenConnections {
  std::mutex mutex;
  std::unordered_set<Connection*> all;
};

OpenConnections& open_connections();

void before_fork() { open_connections().mutex.lock(); }

void after_fork() { open_connections().mutex.unlock(); }

void after_fork_in_child() {
  for (Connection* each : open_connections().all)
    each->abandon("it was opened before this process was forked");
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

Connection::Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, Resume resume,
                       FetchToken token)
    : options_(std::move(options)),
      resume_(std::move(resume)),
      fetch_token_(std::move(token)),
      templates_(TEMPLATES_KEPT_MAX),
      stream_(std::move(stream)),
      read_buffer_(READ_BUFFER_BYTES) {
  note_activity();
  records_.grow(sizeof(FrameHeader));
  sender_ = std::thread([this] { sender_loop(); });
  std::lock_guard<std::mutex> lock(open_connections().mutex);
  open_connections().all.insert(this);
}

Connection::~Connection() {
  close("the connection is no longer used");
  std::lock_guard<std::mutex> lock(open_connections().mutex);
  open_connections().all.erase(this);
}

void Connection::note_activity() { last_activity_ = Clock::now(); }

void Connection::raise_lost() const {
  std::string reason;
  if (abandoned_.load()) {
    reason = lost_reason_;
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    reason = lost_reason_;
  }
  raise("device.lost", options_.device_name + " (" + options_.executor + ") is lost: " + reason);
}

// --- writing records ----------------------------------------------------------------------------

Connection::Batch::Batch(Connection& connection) : connection_(connection) {
  if (connection_.lost()) connection_.raise_lost();
  lock_ = std::unique_lock<std::mutex>(connection_.mutex_);
  if (connection_.window_full_) wait_for_window();
  if (connection_.recording_flag_) wait_for_recorder();
}

// The GIL is taken back without the lock, because other threads that hold the GIL may want the lock.
void Connection::Batch::wait_for_window() {
  while (connection_.window_full_) {
    lock_.unlock();
    {
      GilRelease release;
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.wait_until(waiting, [&] { return !connection_.window_full_; });
      waiting.unlock();
    }
    lock_.lock();
  }
}

// Ops of other threads must not be recorded, so they wait until the recording ends. The recorder may in turn
// wait for one of them (a lock, or a part of the model that runs there), which would be a deadlock; hence the
// idle limit.
void Connection::Batch::wait_for_recorder() {
  auto started = Clock::now();
  if (connection_.is_recorder()) connection_.recorder_active_at_ = started;
  while (connection_.recording_flag_ && !connection_.is_recorder()) {
    std::chrono::duration<double> idle =
        Clock::now() - std::max(started, connection_.recorder_active_at_.load());
    if (idle.count() > connection_.recorder_idle_s_max_) raise_recorder_idle();
    lock_.unlock();
    {
      GilRelease release;
      check_signals();
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.changed_.wait_for(waiting, SIGNAL_CHECK_INTERVAL,
                                    [&] { return !connection_.recording_flag_ || connection_.lost_; });
    }
    if (connection_.lost()) connection_.raise_lost();
    lock_.lock();
  }
}

void Connection::Batch::raise_recorder_idle() {
  std::string recorder = connection_.recorder_name_;
  auto seconds = static_cast<int64_t>(connection_.recorder_idle_s_max_);
  lock_.unlock();
  raise("device.op_refused", "thread " + thread_name() + " cannot use " + connection_.options_.device_name +
                                 ": thread " + recorder +
                                 " is recording a captured model there, and has been idle for " +
                                 std::to_string(seconds) +
                                 " s. It may be waiting for this thread: a captured model must not run parts "
                                 "of itself on other threads, "
                                 "nor wait for a lock of a thread that uses the device");
}

void Connection::Batch::acquire() {
  if (connection_.lost()) connection_.raise_lost();
  lock_.lock();
  if (connection_.recording_flag_) wait_for_recorder();
}

void Connection::Batch::check_new_storages(uint64_t count) {
  if (connection_.free_storages_.size() + (STORAGES_MAX - connection_.next_storage_) >= count) return;
  connection_.raise_too_many_storages();
}

uint32_t Connection::Batch::new_storage() {
  uint32_t storage = connection_.next_free_storage();
  if (connection_.recording_) connection_.graph_of_[storage] = connection_.recording_;
  return storage;
}

uint32_t Connection::next_free_storage() {
  if (!free_storages_.empty()) {
    uint32_t storage = free_storages_.back();
    free_storages_.pop_back();
    return storage;
  }
  if (next_storage_ >= STORAGES_MAX) raise_too_many_storages();
  return next_storage_++;
}

void Connection::raise_too_many_storages() const {
  raise("device.op_refused",
        options_.device_name + ": limit of " + std::to_string(STORAGES_MAX) + " tensors per session reached");
}

uint32_t Connection::Batch::new_generator() {
  auto& free = connection_.free_generators_;
  if (!free.empty()) {
    uint32_t generator = free.back();
    free.pop_back();
    return generator;
  }
  if (connection_.next_generator_ >= GENERATORS_MAX) {
    raise("device.op_refused", connection_.options_.device_name + ": limit of " +
                                   std::to_string(GENERATORS_MAX) + " generators per session reached");
  }
  return connection_.next_generator_++;
}

void Connection::free_generator(uint32_t generator) noexcept {
  if (abandoned_ || lost()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (recording_) {
    generators_to_free_.push_back(generator);
  } else {
    free_generator_now(generator);
  }
}

void Connection::free_generator_now(uint32_t generator) {
  records_.record(Record::FreeGenerator);
  records_.u32(generator);
  free_generators_.push_back(generator);
  records_pending_++;
}

void Connection::Batch::finish_op() {
  Connection& connection = connection_;
  if (++connection.records_pending_ >= connection.options_.flush_ops ||
      connection.records_.size() >= SEAL_BYTES) {
    return finish_frame();
  }
  connection.counters_.ops++;
  if (connection.sender_asleep_ && !connection.deferred_flushes_) connection.wake_sender();
  lock_.unlock();
}

void Connection::Batch::finish_frame() {
  Connection& connection = connection_;
  connection.counters_.ops++;
  connection.seal();
  lock_.unlock();
  connection.send_nowait();
}

uint64_t Connection::Batch::finish_request(PendingReply& reply) {
  Connection& connection = connection_;
  uint64_t number = ++connection.replies_requested_;
  connection.pending_replies_[number] = &reply;
  connection.counters_.replies++;
  connection.seal();
  lock_.unlock();
  connection.send_nowait();
  return number;
}

void Connection::free_storage(uint32_t storage) noexcept {
  if (abandoned_.load(std::memory_order_acquire) || lost()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  records_.record(Record::Free);
  records_.u32(storage);
  auto graph = graph_of_.empty() ? graph_of_.end() : graph_of_.find(storage);
  if (graph == graph_of_.end()) {
    free_storages_.push_back(storage);
  } else {
    graph->second->freed.push_back(storage);  // the graph keeps the number
  }
  records_pending_++;
  if (records_.size() < SEAL_BYTES) {
    if (sender_asleep_) wake_sender();
    return;
  }
  seal();
  lock.unlock();
  send_nowait();
}

bool Connection::over_window() const {
  return frames_.size() > UNACKNOWLEDGED_FRAMES_MAX || unacknowledged_bytes_ > UNACKNOWLEDGED_BYTES_MAX;
}

void Connection::wake_sender() {
  sender_asleep_ = false;
  changed_.notify_all();
}

// --- frames -------------------------------------------------------------------------------------

void Connection::seal() {
  if (records_.size() == sizeof(FrameHeader)) return;
  push(FrameKind::Records, records_.data() + sizeof(FrameHeader), records_.size() - sizeof(FrameHeader),
       false);
  records_.clear();
  records_.grow(sizeof(FrameHeader));
  records_pending_ = 0;
}

void Connection::push(FrameKind kind, const uint8_t* payload, uint64_t size, bool external) {
  Frame frame;
  auto& spares = size > SPARE_BYTES_MAX && !external ? large_spare_buffers_ : spare_buffers_;
  if (!spares.empty()) {
    frame.bytes = std::move(spares.back());
    spares.pop_back();
  }
  frame.number = ++frames_made_;
  FrameHeader header{static_cast<uint32_t>(size), kind, frame.number,
                     replies_received_.load(std::memory_order_relaxed)};
  const auto* start = reinterpret_cast<const uint8_t*>(&header);
  frame.bytes.assign(start, start + sizeof header);
  if (external) {
    frame.external = payload;
    frame.external_bytes = size;
  } else {
    frame.bytes.insert(frame.bytes.end(), payload, payload + size);
  }
  unacknowledged_bytes_ += frame.bytes.size();
  counters_.frames++;
  frames_.push_back(std::move(frame));
  window_full_ = over_window();
}

void Connection::send_nowait() noexcept {
  std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
  try {
    if (sending && send_some()) return;
  } catch (const std::exception& error) {
    return mark_broken(error.what());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  wake_sender();
}

bool Connection::send_some() {
  for (;;) {
    Frame* frame;
    const uint8_t* from;
    uint64_t count;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (broken_ || lost_ || unsent_ >= frames_.size()) return true;
      frame = &frames_[unsent_];  // stable: only sent frames are dropped, under this mutex
      size_t inside = frame->bytes.size();
      bool header = frame->sent < inside;
      from = header ? frame->bytes.data() + frame->sent : frame->external + (frame->sent - inside);
      count = header ? inside - frame->sent : frame->size() - frame->sent;
      writing_ = frame->number;
    }
    size_t sent = write_frame(from, count);
    std::lock_guard<std::mutex> lock(mutex_);
    frame->sent += sent;
    counters_.bytes_sent += sent;
    if (frame->sent == frame->size()) {
      unsent_++;
      acknowledge(acknowledged_);  // the acknowledgement may have come first
      if (unsent_ == frames_.size()) changed_.notify_all();
    } else if (sent == 0) {
      return false;
    }
  }
}

size_t Connection::write_frame(const uint8_t* from, uint64_t count) {
  struct Written {
    Connection& connection;
    ~Written() {
      std::lock_guard<std::mutex> lock(connection.mutex_);
      connection.writing_ = 0;
      if (connection.waiting_for_buffers_) connection.changed_.notify_all();
    }
  } written{*this};
  return stream_->write_some(from, count);
}

// Sends on this thread for a while: the sender thread would pause each time the socket is full. What takes
// longer is left to that thread.
void Connection::send_up_to(uint64_t last) {
  auto sent = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return broken_ || lost_ || unsent_ >= frames_.size() || frames_[unsent_].number > last;
  };
  auto until = Clock::now() + std::chrono::microseconds(std::min(spin_us(), SEND_SPIN_US));
  while (!sent()) {
    if (Clock::now() > until) return send_nowait();
    try {
      std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
      if (!sending) return send_nowait();
      send_some();
    } catch (const std::exception& error) {
      mark_broken(error.what());
    }
    try_read(0);  // an executor that is busy replying does not read
  }
}

void Connection::acknowledge(uint64_t frames_received) {
  complete_fetches(frames_received);
  acknowledged_ = std::max(acknowledged_, frames_received);
  while (!frames_.empty() && unsent_ > 0 && frames_.front().number <= frames_received) {
    Frame& frame = frames_.front();
    unacknowledged_bytes_ -= frame.bytes.size();
    bool is_large = frame.bytes.capacity() > SPARE_BYTES_MAX;
    auto& spares = is_large ? large_spare_buffers_ : spare_buffers_;
    // Reused buffers have their pages mapped; page faults take longer than the copy.
    if (spares.size() < (is_large ? LARGE_SPARE_BUFFERS_MAX : SPARE_BUFFERS_MAX)) {
      spares.push_back(std::move(frame.bytes));
    }
    frames_.pop_front();
    unsent_--;
  }
  if (window_full_) window_full_ = over_window();
}

void Connection::flush() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!lost_) seal();
  }
  send_nowait();
}

void Connection::send_bytes(const std::function<void(Writer&)>& record, const void* bytes, uint64_t size) {
  const auto* from = static_cast<const uint8_t*>(bytes);
  bool external = size > COPIED_UPLOAD_BYTES_MAX;
  GilRelease release;
  uint64_t first, last;
  {
    Batch batch(*this);
    record(batch.records());
    seal();
    first = frames_made_ + 1;
    for (uint64_t at = 0; at < size; at += UPLOAD_FRAME_BYTES) {
      push(FrameKind::Bytes, from + at, std::min(UPLOAD_FRAME_BYTES, size - at), external);
    }
    last = frames_made_;
    counters_.ops++;
  }
  send_up_to(last);
  if (!external) return;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(lock, [&] { return frames_.empty() || frames_.front().number > last; });
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    detach_payload(first, last);
    throw;
  }
}

// Replaces external payloads of frames, because their owner stops waiting. The executor expects the announced
// number of bytes, and gets zeros for the rest.
void Connection::detach_payload(uint64_t first, uint64_t last) {
  static const auto* zeros = new std::vector<uint8_t>(FRAME_BYTES_MAX);
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_for_buffers_++;
  changed_.wait(lock, [&] {
    bool all = true;
    for (Frame& frame : frames_) {
      if (!frame.external || frame.number < first || frame.number > last) continue;
      if (frame.number != writing_) frame.external = zeros->data();
      all &= frame.external == zeros->data();
    }
    return all;
  });
  waiting_for_buffers_--;
}

ConnectionCounters Connection::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  ConnectionCounters now = counters_;
  now.templates = templates_.count();
  now.storages = next_storage_ - 1 - free_storages_.size();
  return now;
}

// --- graphs -------------------------------------------------------------------------------------

void Connection::check_not_recording(const char* what) const {
  if (is_recorder()) {
    raise("device.op_refused", std::string(what) + " cannot be part of a captured graph");
  }
}

void Connection::track_use_in_graph(uint32_t storage, const c10::Storage& held, bool written) {
  if (!is_recorder()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_) return;
  auto owner = graph_of_.find(storage);
  if (owner != graph_of_.end() && owner->second == recording_) return;
  recording_->used.emplace(storage, held);
  if (written) recording_->written.insert(storage);
}

Connection::StorageUse Connection::graph_use(uint32_t graph, uint32_t storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(graph);
  if (found == graphs_.end() || !found->second->used.contains(storage)) return StorageUse::Unused;
  return found->second->written.contains(storage) ? StorageUse::Written : StorageUse::Read;
}

size_t Connection::graph_write_count(uint32_t graph) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(graph);
  return found == graphs_.end() ? 0 : found->second->written.size();
}

bool Connection::is_created_by_recording(uint32_t storage) const {
  if (!is_recorder()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  auto owner = graph_of_.find(storage);
  return owner != graph_of_.end() && owner->second == recording_;
}

uint32_t Connection::begin_graph(const std::string& thread, double idle_s_max) {
  check_not_recording("another graph");
  Batch batch(*this);
  if (free_graphs_.empty() && next_graph_ >= GRAPHS_MAX) {
    raise("device.op_refused",
          options_.device_name + ": limit of " + std::to_string(GRAPHS_MAX) + " graphs reached");
  }
  if (free_graphs_.empty()) free_graphs_.push_back(next_graph_++);
  recording_number_ = free_graphs_.back();
  free_graphs_.pop_back();
  auto& made = graphs_[recording_number_] = std::make_unique<Graph>();
  recording_ = made.get();
  recorder_ = std::this_thread::get_id();
  recorder_active_at_ = Clock::now();
  recorder_name_ = thread;
  recorder_idle_s_max_ = idle_s_max;
  recording_flag_ = true;
  records_.record(Record::GraphBegin);
  records_.u32(recording_number_);
  batch.finish_op();
  return recording_number_;
}

void Connection::end_graph(uint32_t action) {
  uint32_t number;
  std::vector<uint32_t> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_) return;
    records_.record(Record::GraphEnd, action);
    number = recording_number_;
    recording_ = nullptr;
    recording_flag_ = false;
    for (uint32_t generator : generators_to_free_) free_generator_now(generator);
    generators_to_free_.clear();
    waiting.swap(graphs_to_free_);
    free_unbound_outputs();
    changed_.notify_all();
  }
  if (action == GRAPH_DISCARD) release_graph(number);
  for (uint32_t graph : waiting) free_graph(graph);
}

// Sent at once: it is much work for the executor, so batching has no benefit.
void Connection::replay_graph(uint32_t graph) {
  check_not_recording("a replay");
  Batch batch(*this);
  records_.record(Record::GraphReplay);
  records_.u32(graph);
  batch.finish_frame();
}

uint32_t Connection::take_graph_result(uint32_t storage) {
  Batch batch(*this);
  auto graph = graph_of_.find(storage);
  if (graph == graph_of_.end() || recording_) {
    batch.release();
    return 0;
  }
  uint32_t taken = batch.new_storage();
  records_.record(Record::GraphResult);
  records_.u32(storage);
  records_.u32(taken);
  batch.finish_op();
  return taken;
}

void Connection::free_graph(uint32_t graph) noexcept {
  if (abandoned_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recording_) {  // not allowed within a recording
      graphs_to_free_.push_back(graph);
      return;
    }
    if (!lost_) {
      records_.record(Record::GraphFree);
      records_.u32(graph);
      records_pending_++;
    }
  }
  release_graph(graph);
}

// Frees its numbers, and the storages it used: after the lock is released, because freeing takes the lock.
void Connection::release_graph(uint32_t number) {
  std::unique_ptr<Graph> graph;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graphs_.find(number);
  if (found == graphs_.end()) return;
  graph = std::move(found->second);
  graphs_.erase(found);
  std::erase_if(graph_of_, [&](const auto& each) { return each.second == graph.get(); });
  free_storages_.insert(free_storages_.end(), graph->freed.begin(), graph->freed.end());
  free_graphs_.push_back(number);
}

// --- the sender thread --------------------------------------------------------------------------

void Connection::sender_loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (lost_) {
      changed_.wait(lock, [&] { return stopping_; });
      break;
    }
    if (broken_) {
      lock.unlock();
      recover();
      lock.lock();
      continue;
    }
    bool unsent = unsent_ < frames_.size();
    if (unsent || records_.size() > sizeof(FrameHeader)) {
      // More records may join an incomplete frame.
      if (!unsent) changed_.wait_for(lock, FLUSH_DELAY, [&] { return stopping_ || broken_; });
      if (!unsent) seal();
      lock.unlock();
      bool full = false;
      try {
        std::lock_guard<std::mutex> sending(send_mutex_);
        full = !send_some() && !stream_->wait_writable(SEND_SLICE_US);
      } catch (const std::exception& error) {
        mark_broken(error.what());
      }
      if (full) try_read(0);  // an executor that is busy replying does not read
      lock.lock();
    } else {
      sender_asleep_ = true;
      auto woken = [&] { return !sender_asleep_ || stopping_ || broken_ || lost_; };
      bool idle = !changed_.wait_for(
          lock, frames_.empty() ? IDLE_READ_INTERVAL : UNACKNOWLEDGED_READ_INTERVAL, woken);
      sender_asleep_ = false;
      if (!idle) continue;
      lock.unlock();
      try_read(0);  // detects a lost connection before the executor drops the session
      lock.lock();
    }
  }
}

void Connection::mark_broken(const std::string& why) noexcept {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_ || lost_) return;
    broken_ = true;
    broken_reason_ = why;
    stream = stream_;
    changed_.notify_all();
  }
  if (stream) stream->shut_down();
}

void Connection::recover() {
  std::scoped_lock quiet(send_mutex_, read_mutex_);
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || lost_) return;
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
  if (resumed.frames_received > frames_made_) {
    lock.unlock();
    mark_lost("the executor acknowledged frames that were never sent");
    return;
  }
  stream_ = resumed.stream;
  read_start_ = read_end_ = 0;
  incoming_ = {};
  unsent_ = frames_.size();
  acknowledge(resumed.frames_received);
  for (Frame& frame : frames_) frame.sent = 0;
  unsent_ = 0;
  broken_ = false;
  note_activity();
  counters_.resumes++;
  if (stopping_) stream_->shut_down();
  changed_.notify_all();
}

void Connection::mark_lost(const std::string& reason) noexcept {
  std::shared_ptr<Stream> stream;
  std::vector<PendingFetch> completed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (lost_) return;
    lost_reason_ = reason;
    lost_ = true;
    stream = stream_;
    complete_fetches(frames_made_);
    completed.swap(completed_fetches_);
    changed_.notify_all();
  }
  if (stream) stream->shut_down();
  drop_parcels(completed);
}

// --- the end ------------------------------------------------------------------------------------

void Connection::close(const std::string& reason) {
  if (abandoned_) return;
  GilRelease release;
  bool graceful;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    graceful = !lost_ && !broken_ && !stopping_;
    if (graceful) {
      records_.record(Record::CloseSession);
      seal();
    }
    stopping_ = true;
    changed_.notify_all();
  }
  if (sender_.joinable()) sender_.join();
  if (graceful) finish_close();
  mark_lost(reason);
  std::scoped_lock all(send_mutex_, read_mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  frames_.clear();
  unsent_ = 0;
  templates_.clear();
  spare_buffers_.clear();
  large_spare_buffers_.clear();
  stream_.reset();
}

// The executor closes the connection when it has received CloseSession. Closing earlier could lose data in
// flight.
void Connection::finish_close() noexcept {
  auto deadline = Clock::now() + CLOSE_TIMEOUT;
  auto remaining_us = [&] {
    return std::max<int64_t>(
        0, std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count());
  };
  try {
    std::lock_guard<std::mutex> sending(send_mutex_);
    while (!send_some() && remaining_us()) stream_->wait_writable(remaining_us());
  } catch (const std::exception&) {
    return;  // the executor closed first
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!broken_ && !lost_ && remaining_us()) {
    lock.unlock();
    bool is_reader = try_read(remaining_us());
    lock.lock();
    if (!is_reader) changed_.wait_for(lock, CLOSE_POLL_INTERVAL);
  }
}

void Connection::abandon(const std::string& reason) noexcept {
  // The thread and the socket belong to the parent, so they are left alone. The object is never destroyed in
  // the child, because nothing would wake the waiters of its condition variable.
  c10::raw::intrusive_ptr::incref(this);
  lost_reason_ = reason;
  lost_ = true;
  abandoned_ = true;
}

}  // namespace genie
