// One client's end of the op stream to one executor (wire.h): records are gathered into frames, frames are
// sent without waiting, replies are awaited only where a value is needed, and a lost connection is resumed.
//
// Whoever has a full frame sends it at once if the socket takes it; what is left over, frames that are
// never filled, and reconnecting are the sender thread's. There is no reader thread: a thread that waits for
// a reply reads, for itself and for others. `mutex_` guards the state and is never held while anything waits,
// nor while that of another connection is taken.
// A wait of Python's main thread ends when a signal raises; what it waited for is then left behind in order.
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
#include <unordered_set>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
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

// What another executor shows this one's executor to fetch what was shipped under the number.
using Token = std::function<std::string(uint64_t number)>;

struct ConnectionOptions {
  int index = 0;
  std::string device_name;  // "remote_accelerator:0"
  std::string executor;     // who is at the other end, for messages
  std::string kind;         // torch's name of the accelerator there: "cpu", "cuda"
  double op_timeout_s = 600;
  bool blocking = false;  // wait for every op, so that errors are raised where they belong
  uint32_t flush_ops = 32;
  std::string host;  // where other executors fetch from this one, with the next two
  uint32_t port = 0;
  std::string server_name;
};

struct ConnectionCounters {
  uint64_t ops = 0, asks = 0, misses = 0, frames = 0, bytes_sent = 0, replies = 0, resumes = 0;
  uint64_t templates = 0, storages = 0;
};

// What a thread waits for. `into` is filled when given and the size fits; else `payload`. `binds`: it is the
// answer to an Ask, and what it gives is to be bound.
struct Awaited {
  void* into = nullptr;
  uint64_t into_bytes = 0;
  bool binds = false;
  std::vector<uint8_t> payload;
  ReplyKind kind = ReplyKind::Reply;
  bool done = false;
};

class Connection;
using ConnectionPtr = c10::intrusive_ptr<Connection>;

class Connection final : public c10::intrusive_ptr_target {
 public:
  Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, Resume resume, Token token);
  ~Connection() override;

  const ConnectionOptions& options() const { return options_; }
  bool on_cuda() const { return options_.kind == "cuda"; }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  [[noreturn]] void raise_lost() const;

  // While it is held, records may be written. Raises when the connection is lost. Waits first while too much
  // is on its way: a signal then finds nothing half done.
  class Batch {
   public:
    explicit Batch(Connection& connection);
    Writer& records() { return connection_.records_; }
    uint32_t new_storage();
    // Raises unless there are so many.
    void check_new_storages(uint64_t count);
    uint32_t new_generator();
    uint64_t new_parcel() { return ++connection_.last_parcel_; }
    TemplateCache& templates() { return connection_.templates_; }
    ConnectionCounters& counters() { return connection_.counters_; }
    // The record that has been written is whole. Sends what is due.
    void finish_op();
    // As finish_op, and it is sent at once: the last record of its frame.
    void finish_frame();
    // What is written next begins a frame.
    void begin_frame() { connection_.seal(); }
    // As finish_frame, for a Land. When it is over, or this connection is lost, `from` is told that nobody
    // needs the parcel any more. Raises when it is lost already.
    void finish_land(ConnectionPtr from, uint64_t parcel, uint64_t bytes);
    // As finish_op, for a record that asks for a reply: it is the last one of its frame. Returns its number.
    uint64_t finish_ask(Awaited& awaited);
    // Lets others write; no record may be half written.
    void release() {
      if (lock_.owns_lock()) lock_.unlock();
    }
    void acquire();

   private:
    void wait_for_room();
    void wait_for_recorder();
    [[noreturn]] void raise_recorder_idle();  // lock_ held

    Connection& connection_;
    std::unique_lock<std::mutex> lock_;
  };

  // Returns when the reply is there; raises what the executor raised, or that it is lost. Lets the GIL go.
  void await(uint64_t number, Awaited& awaited);
  // For who has the answer to an Ask and cannot bind the `count` tensors that it gives.
  void drop_answer(uint64_t number, uint32_t count);
  // An upload: the record, then the bytes, which are the caller's and are not kept. Returns when they have
  // arrived. After a signal what was not sent yet arrives as zeros.
  void send_bytes(const std::function<void(Writer&)>& record, const void* bytes, uint64_t size);
  // Waits until so many bytes more may be on their way to this executor from others.
  void wait_landed(uint64_t more_bytes);
  // Takes the GIL.
  std::string token(uint64_t parcel) const { return token_(parcel); }
  // Never waits, never raises: the parcel is not needed any more, whether it was fetched or not.
  void unship(uint64_t parcel) noexcept;
  // Never waits, never raises: a tensor has died.
  void free_storage(uint32_t storage) noexcept;
  void free_generator(uint32_t generator) noexcept;
  void flush();
  // While one lives, records wait for the flush at its end; the sender thread is left asleep.
  class FlushAtEnd {
   public:
    explicit FlushAtEnd(Connection& connection) : connection_(connection) { connection_.flush_follows_++; }
    ~FlushAtEnd() {
      connection_.flush_follows_--;
      connection_.flush();
    }
    FlushAtEnd(const FlushAtEnd&) = delete;
    FlushAtEnd& operator=(const FlushAtEnd&) = delete;

   private:
    Connection& connection_;
  };
  void synchronize();
  ConnectionCounters counters();

  // A graph: what the calling thread does from begin to end is written down by the executor, and carried out
  // again by replay. Storages that the graph reads stay alive with it, and the numbers of those that it makes
  // are its own. Raises where something cannot be part of a graph; end_graph must be called all the same.
  // Other threads wait until it has ended; when this one, whose name is `thread`, has had nothing to do here
  // for so long, it may wait for them, and they raise.
  uint32_t begin_graph(const std::string& thread, double idle_s_max);
  // `how`: an argument of GraphEnd.
  void end_graph(uint32_t how);
  void replay_graph(uint32_t graph);
  // A storage of its own with what the graph's result has until the next replay; 0 when it is no graph's.
  uint32_t take_graph_result(uint32_t storage);
  void free_graph(uint32_t graph) noexcept;
  // A storage is used by an op, and `written` to.
  void note_use(uint32_t storage, const c10::Storage& held, bool written) {
    if (recording_flag_.load(std::memory_order_relaxed)) note_use_in_graph(storage, held, written);
  }
  enum class Use : uint8_t { No, Read, Written };
  // What a graph does, or has done so far while it is recorded, with a storage that it has not made.
  Use graph_use(uint32_t graph, uint32_t storage) const;
  // To how many of those it writes.
  size_t graph_writes(uint32_t graph) const;
  // Whether this thread records a graph.
  bool is_recorder() const { return recording_flag_ && recorder_.load() == std::this_thread::get_id(); }
  // Whether it does, and the storage is one that the graph makes.
  bool is_made_by_recording(uint32_t storage) const;
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

  // A reply of which the header has come and not yet the end.
  struct Incoming {
    ReplyHeader header;
    uint64_t at = 0;
    bool into = false;  // it goes to memory of whoever waits for it
    bool open = false;
    std::vector<uint8_t> payload;
  };

  // A reply that is due and that nobody waits for any more.
  struct Left {
    uint64_t into_bytes = 0;
    bool binds = false;
  };

  // A Land that may not be over yet.
  struct Parcel {
    uint64_t frame;
    ConnectionPtr from;
    uint64_t number;
    uint64_t bytes;
  };

  struct Graph {
    std::vector<uint32_t> freed;                      // made in it and dead since
    std::unordered_map<uint32_t, c10::Storage> used;  // there before, and kept
    std::unordered_set<uint32_t> written;             // of those, what it writes to
  };

  void note_use_in_graph(uint32_t storage, const c10::Storage& held, bool written);
  void landed(uint64_t frames_received);                         // mutex_ held
  static void unship(const std::vector<Parcel>& over) noexcept;  // no mutex_ held, of any connection
  void forget_graph(uint32_t number);
  [[noreturn]] void raise_too_many_storages() const;
  uint32_t next_free_storage();                                                    // mutex_ held
  void free_generator_now(uint32_t generator);                                     // mutex_ held
  void seal();                                                                     // mutex_ held
  void push(FrameKind kind, const uint8_t* payload, uint64_t size, bool outside);  // mutex_ held
  void send_nowait() noexcept;                                                     // mutex_ not held
  void send_up_to(uint64_t last);                                                  // mutex_ not held
  bool send_some();                                         // send_mutex_ held; false when the socket is full
  size_t write_frame(const uint8_t* from, uint64_t count);  // likewise
  static int64_t spin_us();                                 // how long to look before sleeping
  void wake_sender();                                       // mutex_ held
  // Without the GIL; `lock` is of mutex_. Raises when the connection is lost, and what a signal raises.
  void wait_until(std::unique_lock<std::mutex>& lock, c10::function_ref<bool()> done);
  void leave(std::unique_lock<std::mutex>& lock, uint64_t number, Awaited& awaited);
  void leave_unbound(uint64_t number, uint32_t count);  // mutex_ held
  void free_unbound();                                  // mutex_ held
  void let_go_of(uint64_t first, uint64_t last);
  bool over_window() const;  // mutex_ held
  void sender_loop();
  bool read_reply(int64_t timeout_us);  // read_mutex_ held; false when none came
  bool try_read(int64_t timeout_us);
  bool fill(size_t need, int64_t timeout_us);               // read_mutex_ held
  void begin_payload(const ReplyHeader& header);            // likewise
  bool read_payload(int64_t timeout_us);                    // likewise
  void take_farewell();                                     // likewise
  void deliver();                                           // likewise
  void check_acknowledged(uint64_t frames_received) const;  // mutex_ held
  void acknowledge(uint64_t frames_received);               // mutex_ held
  void broke(const std::string& why) noexcept;
  void recover();
  void heard();
  void say_goodbye() noexcept;
  void give_up(const std::string& reason) noexcept;
  [[noreturn]] void raise_reply(const Awaited& awaited);

  const ConnectionOptions options_;
  Resume resume_;
  Token token_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Writer records_;
  uint32_t records_pending_ = 0;
  std::deque<Frame> frames_;  // not acknowledged; those from `unsent_` on are not sent whole
  size_t unsent_ = 0;
  uint64_t unacknowledged_bytes_ = 0;
  uint64_t acknowledged_ = 0;  // the last frame that the executor says to have
  uint64_t frames_made_ = 0;
  uint64_t replies_asked_ = 0;
  uint64_t last_parcel_ = 0;     // that this executor ships
  std::deque<Parcel> landings_;  // on their way to it, by frame
  std::vector<Parcel> landed_;   // whose senders are still to be told
  uint64_t landing_bytes_ = 0;
  std::atomic<uint64_t> replies_received_{0};
  std::map<uint64_t, Awaited*> awaited_;
  std::unordered_map<uint64_t, Left> left_;
  std::vector<std::pair<uint64_t, uint32_t>> unbound_;  // answers to be freed: number and count of tensors
  const Awaited* filling_ = nullptr;                    // whose memory is being written to
  uint64_t writing_ = 0;                                // number of the frame that is being sent
  uint32_t leaving_ = 0;                                // threads that wait for one of these two to end
  bool window_full_ = false;
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
  std::atomic<std::chrono::steady_clock::time_point> recorder_seen_;  // when it last had something to do here
  std::string recorder_name_;
  double recorder_idle_s_max_ = 0;
  std::vector<uint32_t> free_generators_;
  uint32_t next_generator_ = 1;
  std::vector<std::vector<uint8_t>> spare_buffers_, large_spare_buffers_;
  TemplateCache templates_;
  ConnectionCounters counters_;
  bool sender_asleep_ = false;
  std::atomic<int> flush_follows_{0};
  int waiting_to_read_ = 0;
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
  Incoming incoming_;
  std::vector<uint8_t> read_buffer_;
  size_t read_start_ = 0, read_end_ = 0;
  std::thread sender_;
};

constexpr size_t READ_BUFFER_BYTES = 64u << 10;

}  // namespace genie
