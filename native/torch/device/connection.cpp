// See connection.h.
#include "connection.h"

#include <algorithm>
#include <chrono>

#include <pybind11/pybind11.h>

#include "errors.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t TEMPLATES_KEPT_MAX = 16384;
constexpr size_t SEAL_BYTES = 48u << 10;
constexpr size_t READ_BUFFER_BYTES = 64u << 10;
constexpr size_t SPARE_BUFFERS_MAX = 64;
// Up to this size an upload is copied into frames, and nobody waits for it.
constexpr uint64_t COPIED_UPLOAD_BYTES_MAX = 1u << 20;
constexpr int64_t READ_SLICE_US = 500'000;
// As long as CUDA itself spins for a result, on machines with cores to spare.
constexpr int64_t SPIN_US = 2000;
constexpr unsigned SPIN_CORES_MIN = 4;
constexpr auto FLUSH_AFTER = std::chrono::microseconds(300);
constexpr auto ACKNOWLEDGED_WITHIN = std::chrono::milliseconds(20);
constexpr auto GOODBYE_WITHIN = std::chrono::seconds(1);

// The interpreter goes on while this thread waits, if this thread holds it.
class LetInterpreterGo {
 public:
  LetInterpreterGo() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~LetInterpreterGo() {
    if (state_) PyEval_RestoreThread(state_);
  }
  LetInterpreterGo(const LetInterpreterGo&) = delete;
  LetInterpreterGo& operator=(const LetInterpreterGo&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace

Connection::Connection(std::shared_ptr<Stream> stream, ConnectionOptions options, Resume resume)
    : options_(std::move(options)),
      resume_(std::move(resume)),
      templates_(TEMPLATES_KEPT_MAX),
      stream_(std::move(stream)),
      read_buffer_(READ_BUFFER_BYTES) {
  heard();
  records_.grow(sizeof(FrameHeader));
  sender_ = std::thread([this] { sender_loop(); });
}

Connection::~Connection() { close("it is no longer used"); }

void Connection::heard() { last_heard_ = Clock::now(); }

void Connection::raise_lost() const {
  std::string because;
  if (abandoned_.load()) {
    because = lost_because_;
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    because = lost_because_;
  }
  raise("device.lost", options_.device_name + " (" + options_.executor + ") is lost: " + because);
}

// --- writing records ----------------------------------------------------------------------------

Connection::Batch::Batch(Connection& connection) : connection_(connection) {
  if (connection_.lost()) connection_.raise_lost();
  lock_ = std::unique_lock<std::mutex>(connection_.mutex_);
  if (connection_.recording_flag_) wait_for_recorder();
}

// What other threads do must not be written down: they wait until the graph is whole. The interpreter is
// taken back without the lock, because others who have it may want the lock.
void Connection::Batch::wait_for_recorder() {
  while (connection_.recording_flag_ && !connection_.is_recorder()) {
    lock_.unlock();
    {
      LetInterpreterGo go;
      std::unique_lock<std::mutex> waiting(connection_.mutex_);
      connection_.changed_.wait(waiting, [&] { return !connection_.recording_flag_ || connection_.lost_; });
    }
    if (connection_.lost()) connection_.raise_lost();
    lock_.lock();
  }
}

void Connection::Batch::acquire() {
  if (connection_.lost()) connection_.raise_lost();
  lock_.lock();
  if (connection_.recording_flag_) wait_for_recorder();
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
  if (next_storage_ >= STORAGES_MAX) {
    raise("device.op_refused", options_.device_name + " already holds " + std::to_string(STORAGES_MAX) +
                                   " tensors of this session");
  }
  return next_storage_++;
}

uint32_t Connection::Batch::new_generator() {
  auto& free = connection_.free_generators_;
  if (!free.empty()) {
    uint32_t generator = free.back();
    free.pop_back();
    return generator;
  }
  if (connection_.next_generator_ >= GENERATORS_MAX) {
    raise("device.op_refused", connection_.options_.device_name + " already has " +
                                   std::to_string(GENERATORS_MAX) + " generators of this session");
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
  connection.counters_.ops++;
  connection.records_pending_++;
  if (connection.records_pending_ < connection.options_.flush_ops &&
      connection.records_.size() < SEAL_BYTES) {
    if (connection.sender_asleep_) connection.wake_sender();
    lock_.unlock();
    return;
  }
  connection.seal();
  bool over = connection.over_window();
  lock_.unlock();
  connection.send_nowait();
  if (over) {
    LetInterpreterGo go;
    lock_.lock();
    connection.wait_until(lock_, [&] { return !connection.over_window(); });
    lock_.unlock();
  }
}

uint64_t Connection::Batch::finish_ask(Awaited& awaited) {
  Connection& connection = connection_;
  uint64_t number = ++connection.replies_asked_;
  connection.awaited_[number] = &awaited;
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
    graph->second->freed.push_back(storage);  // the number stays the graph's
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

void Connection::push(FrameKind kind, const uint8_t* payload, uint64_t size, bool outside) {
  Frame frame;
  if (!spare_buffers_.empty()) {
    frame.bytes = std::move(spare_buffers_.back());
    spare_buffers_.pop_back();
  }
  frame.number = ++frames_made_;
  FrameHeader header{static_cast<uint32_t>(size), kind, frame.number,
                     replies_received_.load(std::memory_order_relaxed)};
  const auto* start = reinterpret_cast<const uint8_t*>(&header);
  frame.bytes.assign(start, start + sizeof header);
  if (outside) {
    frame.outside = payload;
    frame.outside_bytes = size;
  } else {
    frame.bytes.insert(frame.bytes.end(), payload, payload + size);
  }
  unacknowledged_bytes_ += frame.bytes.size();
  counters_.frames++;
  frames_.push_back(std::move(frame));
  if (sender_asleep_) wake_sender();
}

void Connection::send_nowait() noexcept {
  std::unique_lock<std::mutex> sending(send_mutex_, std::try_to_lock);
  if (!sending) return;  // the holder, or else the sender thread, sends it
  try {
    send_some();
  } catch (const std::exception& error) {
    broke(error.what());
  }
}

bool Connection::send_some() {
  for (;;) {
    Frame* frame;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (broken_ || lost_ || unsent_ >= frames_.size()) return true;
      frame = &frames_[unsent_];  // stays where it is: only whole frames are dropped, under this mutex
    }
    size_t inside = frame->bytes.size();
    size_t sent =
        frame->sent < inside
            ? stream_->write_some(frame->bytes.data() + frame->sent, inside - frame->sent)
            : stream_->write_some(frame->outside + (frame->sent - inside), frame->size() - frame->sent);
    std::lock_guard<std::mutex> lock(mutex_);
    frame->sent += sent;
    counters_.bytes_sent += sent;
    if (frame->sent == frame->size()) {
      unsent_++;
      if (unsent_ == frames_.size()) changed_.notify_all();
    } else if (sent == 0) {
      return false;
    }
  }
}

void Connection::acknowledge(uint64_t frames_received) {
  while (!frames_.empty() && unsent_ > 0 && frames_.front().number <= frames_received) {
    Frame& frame = frames_.front();
    unacknowledged_bytes_ -= frame.bytes.size();
    if (spare_buffers_.size() < SPARE_BUFFERS_MAX && frame.bytes.capacity() <= 2 * SEAL_BYTES) {
      spare_buffers_.push_back(std::move(frame.bytes));
    }
    frames_.pop_front();
    unsent_--;
  }
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
  bool outside = size > COPIED_UPLOAD_BYTES_MAX;
  LetInterpreterGo go;
  uint64_t last;
  {
    Batch batch(*this);
    record(batch.records());
    seal();
    for (uint64_t at = 0; at < size; at += FRAME_BYTES_MAX) {
      push(FrameKind::Bytes, from + at, std::min<uint64_t>(FRAME_BYTES_MAX, size - at), outside);
    }
    last = frames_made_;
    counters_.ops++;
  }
  send_nowait();
  std::unique_lock<std::mutex> lock(mutex_);
  auto arrived = [&] { return frames_.empty() || frames_.front().number > last; };
  try {
    if (outside) wait_until(lock, arrived);
    if (!outside && over_window()) wait_until(lock, [&] { return !over_window(); });
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    std::lock_guard<std::mutex> nobody_sends_it(send_mutex_);
    throw;
  }
}

// --- reading ------------------------------------------------------------------------------------

template <class Done>
void Connection::wait_until(std::unique_lock<std::mutex>& lock, Done done) {
  auto started = Clock::now();
  auto limit = std::chrono::duration<double>(options_.op_timeout_s);
  while (!done()) {
    if (lost_) {
      lock.unlock();
      raise_lost();
    }
    if (broken_) {
      changed_.wait_for(lock, ACKNOWLEDGED_WITHIN);
      started = Clock::now();  // resuming has a limit of its own
      continue;
    }
    if (Clock::now() - std::max(started, last_heard_.load()) > limit) {
      lock.unlock();
      give_up("it has not answered for " + std::to_string(options_.op_timeout_s) + " s");
      lock.lock();
      continue;
    }
    lock.unlock();
    bool mine = try_read(READ_SLICE_US);
    lock.lock();
    if (!mine && !done() && !lost_) changed_.wait_for(lock, ACKNOWLEDGED_WITHIN);
  }
}

void Connection::await(uint64_t number, Awaited& awaited) {
  LetInterpreterGo go;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(lock, [&] { return awaited.done; });
  } catch (...) {
    if (lock.owns_lock()) lock.unlock();
    std::lock_guard<std::mutex> nobody_reads_into_it(read_mutex_);
    std::lock_guard<std::mutex> again(mutex_);
    awaited_.erase(number);
    throw;
  }
  lock.unlock();
  if (awaited.kind != ReplyKind::Reply) raise_reply(awaited);
}

void Connection::raise_reply(const Awaited& awaited) {
  Reader reader(awaited.payload.data(), awaited.payload.size());
  std::string code, op, message;
  uint64_t number;
  try {
    code = reader.text();
    op = reader.text();
    number = reader.u64();
    message = reader.text();
  } catch (const ProtocolError& error) {
    fail(error);
  }
  raise_remote(code, op, number, message, options_.device_name + ", " + options_.executor);
}

void Connection::fail(const ProtocolError& error) {
  give_up(std::string("it does not keep to the wire: ") + error.what());
  raise_lost();
}

// True when this thread was the one that read, or tried to.
bool Connection::try_read(int64_t timeout_us) {
  std::unique_lock<std::mutex> reading(read_mutex_, std::try_to_lock);
  if (!reading) return false;
  try {
    // What has come with the first reply is read as well, without waiting for more.
    if (read_reply(timeout_us)) {
      while (read_end_ - read_start_ >= sizeof(ReplyHeader) && read_reply(0)) {
      }
    }
  } catch (const ProtocolError& error) {
    give_up(std::string("it does not keep to the wire: ") + error.what());
  } catch (const std::exception& error) {
    broke(error.what());
  }
  reading.unlock();
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
  return true;
}

// Looks again and again for a while before it sleeps: waking up takes longer than most answers.
size_t Connection::read_soon(void* into, size_t size, int64_t timeout_us) {
  static const int64_t spin_us = std::thread::hardware_concurrency() >= SPIN_CORES_MIN ? SPIN_US : 0;
  auto until = Clock::now() + std::chrono::microseconds(std::min(spin_us, std::max<int64_t>(timeout_us, 0)));
  do {
    if (size_t got = stream_->read_some(into, size, 0)) return got;
  } while (Clock::now() < until);
  return timeout_us > 0 ? stream_->read_some(into, size, timeout_us) : 0;
}

bool Connection::fill(size_t need, int64_t timeout_us) {
  while (read_end_ - read_start_ < need) {
    if (read_start_ == read_end_) read_start_ = read_end_ = 0;
    if (read_buffer_.size() - read_start_ < need) {
      std::memmove(read_buffer_.data(), read_buffer_.data() + read_start_, read_end_ - read_start_);
      read_end_ -= read_start_;
      read_start_ = 0;
    }
    size_t got = read_soon(read_buffer_.data() + read_end_, read_buffer_.size() - read_end_, timeout_us);
    if (got == 0) return false;
    read_end_ += got;
    heard();
  }
  return true;
}

bool Connection::read_reply(int64_t timeout_us) {
  if (!fill(sizeof(ReplyHeader), timeout_us)) return false;
  ReplyHeader header;
  std::memcpy(&header, read_buffer_.data() + read_start_, sizeof header);
  read_start_ += sizeof header;
  if (header.kind == ReplyKind::Acknowledge) {
    if (header.bytes) throw ProtocolError("an acknowledgement has a payload");
    std::lock_guard<std::mutex> lock(mutex_);
    acknowledge(header.frames_received);
    return true;
  }
  read_payload(header);
  return true;
}

void Connection::read_payload(const ReplyHeader& header) {
  constexpr uint64_t UNEXPECTED_BYTES_MAX = 64u << 20;
  bool farewell = header.kind == ReplyKind::Farewell;
  if (!farewell && header.kind != ReplyKind::Reply && header.kind != ReplyKind::Error) {
    throw ProtocolError("a reply is of an unknown kind");
  }
  Awaited* awaited = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = awaited_.find(header.number);
    if (found != awaited_.end()) awaited = found->second;
  }
  bool into = awaited && header.kind == ReplyKind::Reply && awaited->into;
  if (into && header.bytes != awaited->into_bytes)
    throw ProtocolError("a reply has another size than was due");
  std::vector<uint8_t> payload;
  if (!into) {
    if (header.bytes > UNEXPECTED_BYTES_MAX) throw ProtocolError("a reply is larger than allowed");
    payload.resize(header.bytes);
  }
  uint8_t* target = into ? static_cast<uint8_t*>(awaited->into) : payload.data();
  size_t here = std::min<size_t>(header.bytes, read_end_ - read_start_);
  std::memcpy(target, read_buffer_.data() + read_start_, here);
  read_start_ += here;
  for (uint64_t at = here; at < header.bytes;) {
    auto timeout_us = static_cast<int64_t>(options_.op_timeout_s * 1e6);
    size_t got = stream_->read_some(target + at, header.bytes - at, timeout_us);
    if (got == 0) throw ConnectionLost("it stopped in the middle of a reply");
    at += got;
    heard();
  }
  if (farewell) {
    Reader reader(payload.data(), payload.size());
    std::string code = reader.text(), op = reader.text();
    reader.u64();
    std::string said = reader.text() + " (" + code + ")";
    for (char& each : said)
      if (static_cast<unsigned char>(each) >= 0x80) each = '?';
    give_up(said);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  acknowledge(header.frames_received);
  if (header.number != replies_received_ + 1) throw ProtocolError("a reply is missing or came twice");
  replies_received_ = header.number;
  if (!awaited) return;
  awaited->payload = std::move(payload);
  awaited->kind = header.kind;
  awaited->done = true;
  awaited_.erase(header.number);
}

void Connection::synchronize() {
  check_not_recording("waiting");
  Awaited awaited;
  Batch batch(*this);
  batch.records().record(Record::Sync);
  uint64_t number = batch.finish_ask(awaited);
  await(number, awaited);
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

void Connection::note_use_in_graph(uint32_t storage, const c10::Storage& held) {
  if (!is_recorder()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_) return;
  auto owner = graph_of_.find(storage);
  if (owner == graph_of_.end() || owner->second != recording_) recording_->used.emplace(storage, held);
}

uint32_t Connection::begin_graph() {
  check_not_recording("another graph");
  Batch batch(*this);
  if (free_graphs_.empty() && next_graph_ >= GRAPHS_MAX) {
    raise("device.op_refused",
          options_.device_name + " already has " + std::to_string(GRAPHS_MAX) + " graphs");
  }
  if (free_graphs_.empty()) free_graphs_.push_back(next_graph_++);
  recording_number_ = free_graphs_.back();
  free_graphs_.pop_back();
  auto& made = graphs_[recording_number_] = std::make_unique<Graph>();
  recording_ = made.get();
  recorder_ = std::this_thread::get_id();
  recording_flag_ = true;
  records_.record(Record::GraphBegin);
  records_.u32(recording_number_);
  batch.finish_op();
  return recording_number_;
}

void Connection::end_graph(uint32_t how) {
  uint32_t number;
  std::vector<uint32_t> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_) return;
    records_.record(Record::GraphEnd, how);
    number = recording_number_;
    recording_ = nullptr;
    recording_flag_ = false;
    for (uint32_t generator : generators_to_free_) free_generator_now(generator);
    generators_to_free_.clear();
    waiting.swap(graphs_to_free_);
    changed_.notify_all();
  }
  if (how == GRAPH_FORGET) forget_graph(number);
  for (uint32_t graph : waiting) free_graph(graph);
}

// Sent at once: it is much work for the executor, and nothing is gained by waiting for more records.
void Connection::replay_graph(uint32_t graph) {
  check_not_recording("a replay");
  {
    Batch batch(*this);
    records_.record(Record::GraphReplay);
    records_.u32(graph);
    batch.finish_op();
  }
  flush();
}

void Connection::free_graph(uint32_t graph) noexcept {
  if (abandoned_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recording_) {  // it cannot come in between
      graphs_to_free_.push_back(graph);
      return;
    }
    if (!lost_) {
      records_.record(Record::GraphFree);
      records_.u32(graph);
      records_pending_++;
    }
  }
  forget_graph(graph);
}

// Its numbers are free again, and what it used may die: after the lock, because that takes it.
void Connection::forget_graph(uint32_t number) {
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
    bool waiting_records = records_.size() > sizeof(FrameHeader);
    if (waiting_records || unsent_ < frames_.size()) {
      changed_.wait_for(lock, FLUSH_AFTER, [&] { return stopping_ || broken_; });
      if (records_.size() > sizeof(FrameHeader)) seal();
      lock.unlock();
      try {
        std::lock_guard<std::mutex> sending(send_mutex_);
        if (!send_some()) stream_->wait_writable(READ_SLICE_US);
      } catch (const std::exception& error) {
        broke(error.what());
      }
      lock.lock();
    } else if (!frames_.empty()) {
      changed_.wait_for(lock, ACKNOWLEDGED_WITHIN);
      lock.unlock();
      try_read(0);
      lock.lock();
    } else {
      sender_asleep_ = true;
      changed_.wait(lock, [&] { return !sender_asleep_ || stopping_ || broken_ || lost_; });
      sender_asleep_ = false;
    }
  }
}

void Connection::broke(const std::string& why) noexcept {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_ || lost_) return;
    broken_ = true;
    broken_because_ = why;
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
    why = broken_because_;
  }
  Resumed resumed;
  try {
    resumed = resume_(replies_received_);
  } catch (const std::exception& error) {
    give_up(why + "; " + error.what());
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stream_ = resumed.stream;
  read_start_ = read_end_ = 0;
  unsent_ = frames_.size();
  acknowledge(resumed.frames_received);
  for (Frame& frame : frames_) frame.sent = 0;
  unsent_ = 0;
  broken_ = false;
  heard();
  counters_.resumes++;
  if (stopping_) stream_->shut_down();
  changed_.notify_all();
}

void Connection::give_up(const std::string& reason) noexcept {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (lost_) return;
    lost_because_ = reason;
    lost_ = true;
    stream = stream_;
    changed_.notify_all();
  }
  if (stream) stream->shut_down();
}

// --- the end ------------------------------------------------------------------------------------

void Connection::close(const std::string& reason) {
  if (abandoned_) return;
  LetInterpreterGo go;
  bool polite;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    polite = !lost_ && !broken_ && !stopping_;
    if (polite) {
      records_.record(Record::Goodbye);
      seal();
    }
    stopping_ = true;
    changed_.notify_all();
  }
  if (sender_.joinable()) sender_.join();
  if (polite) say_goodbye();
  give_up(reason);
  std::scoped_lock all(send_mutex_, read_mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  frames_.clear();
  unsent_ = 0;
  templates_.clear();
  spare_buffers_.clear();
  stream_.reset();
}

// The executor closes when it has heard it. Leaving before that could lose what is still on its way.
void Connection::say_goodbye() noexcept {
  auto deadline = Clock::now() + GOODBYE_WITHIN;
  auto left_us = [&] {
    return std::max<int64_t>(
        0, std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count());
  };
  try {
    std::lock_guard<std::mutex> sending(send_mutex_);
    while (!send_some() && left_us()) stream_->wait_writable(left_us());
  } catch (const std::exception&) {
    return;  // it has left before us
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!broken_ && !lost_ && left_us()) {
    lock.unlock();
    bool mine = try_read(left_us());
    lock.lock();
    if (!mine) changed_.wait_for(lock, ACKNOWLEDGED_WITHIN);
  }
}

void Connection::abandon(const std::string& reason) noexcept {
  // The thread and the socket are the parent's: leaving them is right, ending them is not. Nor can this
  // object ever be destroyed here, where nobody will wake those who wait on its condition.
  c10::raw::intrusive_ptr::incref(this);
  lost_because_ = reason;
  lost_ = true;
  abandoned_ = true;
}

}  // namespace genie
