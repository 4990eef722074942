// The client's end of the op stream to one executor (wire.h): batches records into frames, sends frames
// without waiting, waits for replies only where a value is needed, and resumes after a connection loss.
// Its state is in parts: FrameQueue, ReplyTable, ReplyReader, GraphRecorder, ParcelFetches. This class has
// the locks, the threads and the socket.
//
// The thread that fills a frame sends it if the socket accepts it. The sender thread sends the rest and
// incomplete frames, and reconnects. There is no reader thread: a thread that waits for a reply reads, for
// itself and for others. `mutex_` guards the state and is never held during a wait, nor while the mutex of
// another connection is taken. A wait on Python's main thread ends when a signal handler raises; its reply is
// then discarded when it arrives. Does not know ops (dispatch.cpp), nor device indices (device_registry.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include "../settings.h"
#include "../stream.h"
#include "../wire.h"
#include "frame_queue.h"
#include "graph_recorder.h"
#include "number_pool.h"
#include "parcel_fetches.h"
#include "reply_reader.h"
#include "reply_table.h"
#include "templates.h"

namespace genie {

struct ResumeResult {
  std::shared_ptr<Stream> stream;
  uint64_t frames_received;
};
// Reconnects; the executor resends replies after `replies_received`. Throws if the executor is lost.
using ResumeFunction = std::function<ResumeResult(uint64_t replies_received)>;

// The token with which another executor may fetch the parcel of this number.
using FetchTokenFunction = std::function<std::string(uint64_t number)>;

struct ConnectionOptions {
  int device_index = 0;
  std::string device_name;           // "remote_accelerator:0"
  std::string executor_description;  // node and job of the executor, for messages
  std::string accelerator_kind;      // torch's name of the executor's accelerator: "cpu", "cuda"
  double op_timeout_s = 600;
  bool waits_for_every_op = false;  // so that its error is raised at the call
  uint32_t ops_per_frame_max = 32;
  std::string host;  // address for other executors, with the next two
  uint32_t port = 0;
  std::string tls_server_name;
};

struct ConnectionCounters {
  uint64_t ops = 0, dynamic_ops = 0, template_misses = 0, frames = 0, bytes_sent = 0, replies = 0,
           resumes = 0;
  uint64_t templates = 0, storages = 0;
};

class Connection final : public c10::intrusive_ptr_target {
 public:
  Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, ResumeFunction resume,
             FetchTokenFunction token);
  ~Connection() override;

  const ConnectionOptions& options() const { return options_; }
  bool executor_uses_cuda() const { return options_.accelerator_kind == "cuda"; }
  bool executor_uses_cpu() const { return options_.accelerator_kind == "cpu"; }
  bool is_session_lost() const { return is_session_lost_.load(std::memory_order_acquire); }
  [[noreturn]] void raise_session_lost() const;

  // Holds the lock for writing records. Raises if the connection is lost. Waits first while the window is
  // full, so that a signal cannot interrupt a half-written record.
  class LockedRecordWriter {
   public:
    explicit LockedRecordWriter(Connection& connection);
    WireWriter& records() { return connection_.frames_.records(); }
    uint32_t assign_storage_number();
    // Raises unless `count` new storages are available.
    void check_storage_numbers_left(uint64_t count);
    uint32_t assign_generator_number();
    uint64_t assign_parcel_number() { return ++connection_.last_parcel_number_; }
    TemplateCache& templates() { return connection_.templates_; }
    // Those that the last Settings record has sent, if any.
    std::optional<Settings>& sent_settings() { return connection_.sent_settings_; }
    ConnectionCounters& counters() { return connection_.counters_; }
    // Ends a record. Sends the frame if it is full.
    void finish_record();
    // As finish_record, and sends the frame at once.
    void finish_record_and_send_frame();
    // The next record starts a new frame.
    void finish_current_frame() { connection_.queue_records_as_frame(); }
    // As finish_record_and_send_frame, for a FetchParcel. When the fetch has ended, or this connection is
    // lost, `source` drops the parcel. Raises if this connection is lost.
    void finish_fetch_parcel_record(ConnectionPtr source, uint64_t parcel_number, uint64_t bytes);
    // As finish_record_and_send_frame, for a record that requests a reply. Returns the number of the reply.
    uint64_t finish_record_and_request_reply(PendingReply& reply);
    // Lets other threads write. Not within a record.
    void unlock() {
      if (lock_.owns_lock()) lock_.unlock();
    }
    void lock_again();

   private:
    void wait_for_send_window();
    void wait_for_other_recording_thread();
    [[noreturn]] void raise_recording_thread_idle();  // lock_ held

    Connection& connection_;
    std::unique_lock<std::mutex> lock_;
  };

  // Waits for the reply; raises the executor's error, or that it is lost. Releases the GIL.
  void wait_for_reply(uint64_t reply_number, PendingReply& reply);
  // Discards the `count` outputs of a DynamicOp whose reply arrived but cannot be used.
  void discard_outputs(uint64_t reply_number, uint32_t output_count);
  // Uploads: the record, then the bytes, which the caller owns. Returns when they have arrived. After a
  // signal, bytes that were not sent yet arrive as zeros.
  void send_upload(const std::function<void(WireWriter&)>& write_record, const void* data,
                   uint64_t size_bytes);
  // Waits until this executor may fetch `more_bytes` from others.
  void wait_for_fetch_window(uint64_t more_bytes);
  // Takes the GIL.
  std::string make_fetch_token(uint64_t parcel_number) const { return fetch_token_function_(parcel_number); }
  // Never waits, never raises. The parcel is no longer needed, fetched or not.
  void drop_parcel(uint64_t parcel_number) noexcept;
  // Never waits, never raises.
  void free_storage(uint32_t storage) noexcept;
  void free_generator(uint32_t generator) noexcept;
  void flush();
  // During its lifetime records wait for the flush at its end, and the sender thread is not woken.
  class DeferredFlush {
   public:
    explicit DeferredFlush(Connection& connection) : connection_(connection) {
      connection_.deferred_flush_count_++;
    }
    ~DeferredFlush() {
      connection_.deferred_flush_count_--;
      connection_.flush();
    }
    DeferredFlush(const DeferredFlush&) = delete;
    DeferredFlush& operator=(const DeferredFlush&) = delete;

   private:
    Connection& connection_;
  };
  void synchronize();
  ConnectionCounters counters();

  // The executor records what the calling thread does from begin_graph to end_graph; replay_graph runs it
  // again. Storages that the graph reads stay alive with it, and it owns the numbers of those that it
  // creates. Ops that cannot be part of a graph raise; end_graph must be called in any case. Other threads
  // wait until the recording has ended; they raise when the recording thread, named `thread_name`, has not
  // used the connection for `recording_thread_idle_s_max`, because it may be waiting for them.
  uint32_t begin_graph(const std::string& thread_name, double recording_thread_idle_s_max);
  // `action`: GRAPH_DISCARD, GRAPH_KEEP or GRAPH_COMPILE.
  void end_graph(uint32_t action);
  void replay_graph(uint32_t graph);
  // A new storage with the current contents of a graph's result; 0 if the storage is not a graph's result.
  uint32_t copy_graph_result(uint32_t result_storage);
  void free_graph(uint32_t graph) noexcept;
  // Called for each storage that an op uses; `is_written`: it writes to it.
  void track_storage_access(uint32_t storage, const c10::Storage& c10_storage, bool is_written) {
    if (graphs_.is_recording()) track_storage_access_in_graph(storage, c10_storage, is_written);
  }
  // How a recorded graph accesses a storage that it did not create; during the recording, so far.
  StorageAccess storage_access_in_graph(uint32_t graph, uint32_t storage) const;
  // The number of such storages that it writes to.
  size_t graph_written_storage_count(uint32_t graph) const;
  // Whether this thread is recording a graph.
  bool is_recording_thread() const { return graphs_.is_recording_thread(); }
  // Whether this thread is recording, and the graph creates the storage.
  bool is_created_by_recording(uint32_t storage) const;
  // Raises if this thread is recording: `operation` cannot be part of a graph.
  void check_not_recording(const char* operation) const;

  // The executor violated the protocol: closes the session and raises.
  [[noreturn]] void fail_session_and_raise(const ProtocolError& error);

  // Ends the session, waiting at most REMOTE_CLOSE_TIMEOUT, and stops the sender thread.
  void close(const std::string& reason);
  // In a forked child: the connection belongs to the parent. Touches neither locks nor the socket.
  void abandon_after_fork(const std::string& reason) noexcept;

 private:
  // record_writer.cpp
  [[noreturn]] void raise_too_many_storages() const;
  uint32_t assign_storage_number();               // mutex_ held
  void write_free_generator(uint32_t generator);  // mutex_ held

  // sending.cpp
  void queue_records_as_frame();                           // mutex_ held
  void acknowledge_frames(uint64_t frames_received);       // mutex_ held
  void wake_sender_thread();                               // mutex_ held
  void send_frames_nowait() noexcept;                      // mutex_ not held
  void send_frames_up_to(uint64_t last_frame_number);      // mutex_ not held
  bool try_send_queued_frames();                           // send_mutex_ held; false when the socket is full
  size_t write_frame_bytes(const FrameQueue::Part& part);  // likewise
  void sender_loop();

  // replies.cpp
  // Without the GIL; `lock` holds mutex_. Raises when the connection is lost, and what a signal handler
  // raises.
  void wait_until(std::unique_lock<std::mutex>& lock, c10::function_ref<bool()> done);
  void abandon_pending_reply(std::unique_lock<std::mutex>& lock, uint64_t reply_number, PendingReply& reply);
  void bind_and_free_unbound_outputs();  // mutex_ held
  [[noreturn]] void raise_reply_error(const PendingReply& reply);
  bool try_read_replies_as_reader(int64_t timeout_us);
  bool read_reply(int64_t timeout_us);                                  // read_mutex_ held; false on timeout
  void begin_reading_payload();                                         // read_mutex_ held
  bool read_payload_part(int64_t timeout_us);                           // read_mutex_ held; false on timeout
  void deliver_reply();                                                 // read_mutex_ held
  void mark_lost_by_fatal_reply();                                      // read_mutex_ held
  void check_acknowledged_frame_count(uint64_t frames_received) const;  // mutex_ held

  // transfers.cpp
  void replace_external_payloads_with_zeros(uint64_t first_frame_number, uint64_t last_frame_number);
  // No mutex_ of any connection is held.
  static void drop_fetched_parcels(const std::vector<ParcelFetch>& completed) noexcept;

  // graph_recording.cpp
  void track_storage_access_in_graph(uint32_t storage, const c10::Storage& c10_storage, bool is_written);
  void release_graph_numbers_and_storages(uint32_t graph_number);

  // connection.cpp
  void mark_disconnected(const std::string& why) noexcept;
  void resume_connection();
  void mark_session_lost(const std::string& reason) noexcept;
  void flush_and_wait_for_remote_close() noexcept;

  const ConnectionOptions options_;
  ResumeFunction resume_function_;
  FetchTokenFunction fetch_token_function_;

  mutable std::mutex mutex_;
  std::condition_variable state_changed_;
  FrameQueue frames_;
  ReplyTable replies_;
  GraphRecorder graphs_;
  ParcelFetches fetches_;
  TemplateCache templates_;
  std::optional<Settings> sent_settings_;
  NumberPool storage_numbers_{1, STORAGES_MAX}, generator_numbers_{1, GENERATORS_MAX};
  uint64_t last_parcel_number_ = 0;  // last number that this executor has published
  ConnectionCounters counters_;
  // Threads that wait until a reply, or the payload of a frame, does not use their memory any more.
  uint32_t threads_waiting_for_buffers_ = 0;
  uint32_t threads_waiting_for_reader_ = 0;
  std::atomic<int> deferred_flush_count_{0};
  bool is_sender_thread_asleep_ = false;
  bool is_closing_ = false;
  bool is_disconnected_ = false;
  std::string disconnect_reason_;
  std::atomic<bool> is_session_lost_{false};
  std::atomic<bool> is_abandoned_after_fork_{false};
  std::string session_lost_reason_;

  std::mutex send_mutex_;  // taken before mutex_, never after
  std::mutex read_mutex_;  // likewise; guards `reader_`
  ReplyReader reader_;
  std::shared_ptr<Stream> stream_;
  std::thread sender_thread_;
};

}  // namespace genie
