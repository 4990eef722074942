// One client's end of the op stream to one executor (wire.h): records are gathered into frames, frames are
// sent without waiting, replies are awaited only where a value is needed, and a lost connection is resumed.
//
// Whoever has a full frame sends it at once if the socket takes it; what is left over, frames that are
// never filled, and reconnecting are the sender thread's. There is no reader thread: a thread that waits for
// a reply reads, for itself and for others. `mutex_` guards the state and is never held while anything waits.
// Not for: what ops mean (dispatch.cpp), and which executor (roster.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "../stream.h"
#include "../wire.h"
#include "templates.h"

namespace genie {

struct Resumed {
  std::shared_ptr<Stream> stream;
  uint64_t frames_received;
};
// Connects again for the given number of replies received. Throws when the executor is gone for good.
using Resume = std::function<Resumed(uint64_t replies_received)>;

struct ConnectionOptions {
  int index = 0;
  std::string device_name;  // "remote_accelerator:0"
  std::string executor;     // who is at the other end, for messages
  std::string kind;         // torch's name of the accelerator there: "cpu", "cuda"
  double op_timeout_s = 600;
  bool blocking = false;  // wait for every op, so that errors are raised where they belong
  uint32_t flush_ops = 32;
};

struct ConnectionCounters {
  uint64_t ops = 0, asks = 0, misses = 0, frames = 0, bytes_sent = 0, replies = 0, resumes = 0;
  uint64_t templates = 0, storages = 0;
};

// What a thread waits for. `into` is filled when given and the size fits; else `payload`.
struct Awaited {
  void* into = nullptr;
  uint64_t into_bytes = 0;
  std::vector<uint8_t> payload;
  ReplyKind kind = ReplyKind::Reply;
  bool done = false;
};

class Connection final : public c10::intrusive_ptr_target {
 public:
  Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, Resume resume);
  ~Connection() override;

  const ConnectionOptions& options() const { return options_; }
  bool on_cuda() const { return options_.kind == "cuda"; }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  [[noreturn]] void raise_lost() const;

  // While it is held, records may be written. Raises when the connection is lost.
  class Batch {
   public:
    explicit Batch(Connection& connection);
    Writer& records() { return connection_.records_; }
    uint32_t new_storage();
    uint32_t new_generator();
    TemplateCache& templates() { return connection_.templates_; }
    ConnectionCounters& counters() { return connection_.counters_; }
    // The record that has been written is whole. Sends what is due, and waits while too much is on its way.
    void finish_op();
    // As finish_op, for a record that asks for a reply: it is the last one of its frame. Returns its number.
    uint64_t finish_ask(Awaited& awaited);
    // Lets others write; no record may be half written.
    void release() { lock_.unlock(); }
    void acquire();

   private:
    void wait_for_recorder();

    Connection& connection_;
    std::unique_lock<std::mutex> lock_;
  };

  // Returns when the reply is there; raises what the executor raised, or that it is lost. Lets the GIL go.
  void await(uint64_t number, Awaited& awaited);
  // An upload: the record, then the bytes, which are the caller's and are not kept. Returns when they have
  // arrived.
  void send_bytes(const std::function<void(Writer&)>& record, const void* bytes, uint64_t size);
  // Never waits, never raises: a tensor has died.
  void free_storage(uint32_t storage) noexcept;
  void free_generator(uint32_t generator) noexcept;
  void flush();
  void synchronize();
  ConnectionCounters counters();

  // A graph: what the calling thread does from begin to end is written down by the executor, and carried out
  // again by replay. Storages that the graph reads stay alive with it, and the numbers of those that it makes
  // are its own. Raises where something cannot be part of a graph; end_graph must be called all the same.
  uint32_t begin_graph();
  // `how`: an argument of GraphEnd.
  void end_graph(uint32_t how);
  void replay_graph(uint32_t graph);
  void free_graph(uint32_t graph) noexcept;
  // A storage is used by an op.
  void note_use(uint32_t storage, const c10::Storage& held) {
    if (recording_flag_.load(std::memory_order_relaxed)) note_use_in_graph(storage, held);
  }
  // Whether this thread records a graph.
  bool is_recorder() const { return recording_flag_ && recorder_.load() == std::this_thread::get_id(); }
  // Something that cannot be written down is about to be done: raises while this thread records.
  void check_not_recording(const char* what) const;

  // The executor has said what it must not: the session is over. Raises that.
  [[noreturn]] void fail(const ProtocolError& error);

  // Says goodbye, for at most a second, and stops the sender thread.
  void close(const std::string& reason);
  // In a forked child: the connection is the parent's. Touches no lock and no socket.
  void abandon(const std::string& reason) noexcept;

 private:
  struct Frame {
    std::vector<uint8_t> bytes;        // header and payload, or the header alone
    const uint8_t* outside = nullptr;  // payload that belongs to a thread that waits in send_bytes
    uint64_t outside_bytes = 0;
    uint64_t number = 0;
    uint64_t sent = 0;
    uint64_t size() const { return bytes.size() + outside_bytes; }
  };

  struct Graph {
    std::vector<uint32_t> freed;                      // made in it and dead since
    std::unordered_map<uint32_t, c10::Storage> used;  // there before, and kept
  };

  void note_use_in_graph(uint32_t storage, const c10::Storage& held);
  void forget_graph(uint32_t number);
  uint32_t next_free_storage();                                                    // mutex_ held
  void free_generator_now(uint32_t generator);                                     // mutex_ held
  void seal();                                                                     // mutex_ held
  void push(FrameKind kind, const uint8_t* payload, uint64_t size, bool outside);  // mutex_ held
  void send_nowait() noexcept;                                                     // mutex_ not held
  bool send_some();    // send_mutex_ held; false when the socket is full
  void wake_sender();  // mutex_ held
  template <class Done>
  void wait_until(std::unique_lock<std::mutex>& lock, Done done);
  bool over_window() const;  // mutex_ held
  void sender_loop();
  bool read_reply(int64_t timeout_us);  // read_mutex_ held; false when none came
  bool try_read(int64_t timeout_us);
  bool fill(size_t need, int64_t timeout_us);                     // read_mutex_ held
  size_t read_soon(void* into, size_t size, int64_t timeout_us);  // likewise
  void read_payload(const ReplyHeader& header);                   // read_mutex_ held
  void acknowledge(uint64_t frames_received);                     // mutex_ held
  void broke(const std::string& why) noexcept;
  void recover();
  void heard();
  void say_goodbye() noexcept;
  void give_up(const std::string& reason) noexcept;
  [[noreturn]] void raise_reply(const Awaited& awaited);

  const ConnectionOptions options_;
  Resume resume_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Writer records_;
  uint32_t records_pending_ = 0;
  std::deque<Frame> frames_;  // not acknowledged; those from `unsent_` on are not sent whole
  size_t unsent_ = 0;
  uint64_t unacknowledged_bytes_ = 0;
  uint64_t frames_made_ = 0;
  uint64_t replies_asked_ = 0;
  std::atomic<uint64_t> replies_received_{0};
  std::map<uint64_t, Awaited*> awaited_;
  std::vector<uint32_t> free_storages_;
  uint32_t next_storage_ = 1;
  std::unordered_map<uint32_t, std::unique_ptr<Graph>> graphs_;
  std::unordered_map<uint32_t, Graph*> graph_of_;  // of storages whose numbers belong to a graph
  std::vector<uint32_t> free_graphs_;
  std::vector<uint32_t> graphs_to_free_, generators_to_free_;  // when the recording has ended
  uint32_t next_graph_ = 0;
  Graph* recording_ = nullptr;  // one of graphs_
  uint32_t recording_number_ = 0;
  std::atomic<bool> recording_flag_{false};
  std::atomic<std::thread::id> recorder_;
  std::vector<uint32_t> free_generators_;
  uint32_t next_generator_ = 1;
  std::vector<std::vector<uint8_t>> spare_buffers_;
  TemplateCache templates_;
  ConnectionCounters counters_;
  bool sender_asleep_ = false;
  bool stopping_ = false;
  bool broken_ = false;
  std::string broken_because_;
  std::atomic<bool> lost_{false};
  std::atomic<bool> abandoned_{false};
  std::string lost_because_;
  std::atomic<std::chrono::steady_clock::time_point> last_heard_;

  std::mutex send_mutex_;  // taken before mutex_, never after
  std::mutex read_mutex_;  // likewise
  std::shared_ptr<Stream> stream_;
  std::vector<uint8_t> read_buffer_;
  size_t read_start_ = 0, read_end_ = 0;
  std::thread sender_;
};

using ConnectionPtr = c10::intrusive_ptr<Connection>;

}  // namespace genie
