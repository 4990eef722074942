// Writes records for the executor, and assigns the numbers of its objects. See connection.h.
#include <algorithm>
#include <chrono>

#include "connection.h"
#include "errors.h"
#include "interrupts.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Connection::LockedRecordWriter::LockedRecordWriter(Connection& connection) : connection_(connection) {
  if (connection_.is_session_lost()) connection_.raise_session_lost();
  lock_ = std::unique_lock<std::mutex>(connection_.mutex_);
  if (connection_.frames_.is_window_full()) wait_for_send_window();
  if (connection_.graphs_.is_recording()) wait_for_other_recording_thread();
}

// The GIL is taken back without the lock, because other threads that hold the GIL may want the lock.
void Connection::LockedRecordWriter::wait_for_send_window() {
  while (connection_.frames_.is_window_full()) {
    lock_.unlock();
    {
      GilRelease release;
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.wait_until(waiting, [&] { return !connection_.frames_.is_window_full(); });
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
  GraphRecorder& graphs = connection_.graphs_;
  if (graphs.is_recording_thread()) graphs.update_last_used_time(started);
  while (graphs.is_recording() && !graphs.is_recording_thread()) {
    if (graphs.is_idle(started)) raise_recording_thread_idle();
    lock_.unlock();
    {
      GilRelease release;
      run_pending_signal_handlers();
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.state_changed_.wait_for(waiting, SIGNAL_CHECK_INTERVAL, [&] {
        return !graphs.is_recording() || connection_.is_session_lost_;
      });
    }
    if (connection_.is_session_lost()) connection_.raise_session_lost();
    lock_.lock();
  }
}

void Connection::LockedRecordWriter::raise_recording_thread_idle() {
  std::string recorder = connection_.graphs_.thread_name();
  auto seconds = static_cast<int64_t>(connection_.graphs_.idle_s_max());
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
  if (connection_.graphs_.is_recording()) wait_for_other_recording_thread();
}

void Connection::LockedRecordWriter::check_storage_numbers_left(uint64_t count) {
  if (connection_.storage_numbers_.unassigned_count() < count) connection_.raise_too_many_storages();
}

uint32_t Connection::LockedRecordWriter::assign_storage_number() {
  uint32_t storage = connection_.assign_storage_number();
  connection_.graphs_.add_created_storage(storage);
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
  if (graphs_.is_recording()) {
    graphs_.free_generator_after_recording(generator);
  } else {
    write_free_generator(generator);
  }
}

void Connection::write_free_generator(uint32_t generator) {
  frames_.records().begin_record(RecordKind::FreeGenerator);
  frames_.records().write_u32(generator);
  frames_.count_record();
  generator_numbers_.free(generator);
}

void Connection::LockedRecordWriter::finish_record() {
  Connection& connection = connection_;
  if (connection.frames_.count_record() >= connection.options_.ops_per_frame_max ||
      connection.frames_.has_frame_of_records()) {
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
  uint64_t number = connection.replies_.request(reply);
  connection.counters_.replies++;
  connection.queue_records_as_frame();
  lock_.unlock();
  connection.send_frames_nowait();
  return number;
}

void Connection::free_storage(uint32_t storage) noexcept {
  if (is_abandoned_after_fork_.load(std::memory_order_acquire) || is_session_lost()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  frames_.records().begin_record(RecordKind::Free);
  frames_.records().write_u32(storage);
  frames_.count_record();
  if (!graphs_.keeps_number_of_freed_storage(storage)) storage_numbers_.free(storage);
  if (!frames_.has_frame_of_records()) {
    if (is_sender_thread_asleep_) wake_sender_thread();
    return;
  }
  queue_records_as_frame();
  lock.unlock();
  send_frames_nowait();
}

}  // namespace genie
