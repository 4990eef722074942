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
constexpr auto REMOTE_CLOSE_POLL_INTERVAL = std::chrono::milliseconds(20);
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
      stream_(std::move(stream)) {
  sender_thread_ = std::thread([this] { sender_loop(); });
  std::lock_guard<std::mutex> lock(open_connections().mutex);
  open_connections().connections.insert(this);
}

Connection::~Connection() {
  close("the connection is no longer used");
  std::lock_guard<std::mutex> lock(open_connections().mutex);
  open_connections().connections.erase(this);
}

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

ConnectionCounters Connection::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  ConnectionCounters now = counters_;
  now.frames = frames_.created_count();
  now.templates = templates_.template_count();
  now.storages = storage_numbers_.assigned_count();
  return now;
}

// --- the state of the connection ------------------------------------------------------------------

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
    resumed = resume_function_(replies_.received_count());
  } catch (const std::exception& error) {
    mark_session_lost(why + "; " + error.what());
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (resumed.frames_received > frames_.created_count()) {
    lock.unlock();
    mark_session_lost("the executor acknowledged frames that were never sent");
    return;
  }
  stream_ = resumed.stream;
  reader_.restart();
  fetches_.complete(resumed.frames_received);
  frames_.rewind(resumed.frames_received);
  is_disconnected_ = false;
  counters_.resumes++;
  if (is_closing_) stream_->shut_down();
  state_changed_.notify_all();
}

void Connection::mark_session_lost(const std::string& reason) noexcept {
  std::shared_ptr<Stream> stream;
  std::vector<ParcelFetch> completed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_session_lost_) return;
    session_lost_reason_ = reason;
    is_session_lost_ = true;
    stream = stream_;
    fetches_.complete(frames_.created_count());
    completed = fetches_.take_completed();
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
      frames_.records().begin_record(RecordKind::CloseSession);
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
  frames_.clear();
  templates_.clear();
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
