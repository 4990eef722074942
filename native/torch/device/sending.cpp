// Sends the frames of a connection, on the threads that fill them or on the sender thread. See connection.h.
#include <algorithm>
#include <chrono>

#include "connection.h"
#include "interrupts.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t SEND_ON_CALLER_THREAD_US_MAX = 5000;
constexpr int64_t SOCKET_WRITABLE_WAIT_US_MAX = 50'000;
constexpr auto INCOMPLETE_FRAME_DELAY = std::chrono::microseconds(300);
constexpr auto IDLE_READ_INTERVAL = std::chrono::milliseconds(1000);
constexpr auto UNACKNOWLEDGED_READ_INTERVAL = std::chrono::milliseconds(50);

}  // namespace

void Connection::queue_records_as_frame() { frames_.queue_records(replies_.received_count()); }

void Connection::acknowledge_frames(uint64_t frames_received) {
  fetches_.complete(frames_received);
  frames_.acknowledge(frames_received);
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
    FrameQueue::Part part;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_disconnected_ || is_session_lost_ || !frames_.has_unsent()) return true;
      part = frames_.begin_write();
    }
    size_t sent = write_frame_bytes(part);
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.bytes_sent += sent;
    if (frames_.add_sent_bytes(sent)) {
      if (!frames_.has_unsent()) state_changed_.notify_all();
    } else if (sent == 0) {
      return false;
    }
  }
}

size_t Connection::write_frame_bytes(const FrameQueue::Part& part) {
  struct FrameWriteGuard {
    Connection& connection;
    ~FrameWriteGuard() {
      std::lock_guard<std::mutex> lock(connection.mutex_);
      connection.frames_.end_write();
      if (connection.threads_waiting_for_buffers_) connection.state_changed_.notify_all();
    }
  } written{*this};
  return stream_->write_some(part.data, part.bytes);
}

// Sends on this thread for a while: the sender thread would pause each time the socket is full. What takes
// longer is left to that thread.
void Connection::send_frames_up_to(uint64_t last_frame_number) {
  auto sent = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_disconnected_ || is_session_lost_ || frames_.is_sent(last_frame_number);
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

void Connection::flush() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_session_lost_) queue_records_as_frame();
  }
  send_frames_nowait();
}

void Connection::wake_sender_thread() {
  is_sender_thread_asleep_ = false;
  state_changed_.notify_all();
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
    bool unsent = frames_.has_unsent();
    if (unsent || frames_.has_records()) {
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
          lock, frames_.has_unacknowledged() ? UNACKNOWLEDGED_READ_INTERVAL : IDLE_READ_INTERVAL, woken);
      is_sender_thread_asleep_ = false;
      if (!idle) continue;
      lock.unlock();
      try_read_replies_as_reader(0);  // detects a lost connection before the executor drops the session
      lock.lock();
    }
  }
}

}  // namespace genie
