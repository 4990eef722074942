// What comes back from the executor: reading it, and waiting for it. See connection.h.
#include <algorithm>
#include <chrono>

#include "connection.h"
#include "errors.h"
#include "interrupts.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t READ_SLICE_US = 500'000;
// CUDA itself looks for a result without a pause; so does this, for a while, on machines with cores to spare.
constexpr int64_t SPIN_US = 10'000;
constexpr unsigned SPIN_CORES_MIN = 4;
constexpr auto OTHERS_READ_FOR = std::chrono::milliseconds(20);
// Copies that wait on other executors' shelves take memory there.
constexpr uint64_t LANDING_BYTES_MAX = 256u << 20;
constexpr size_t LANDINGS_MAX = 256;
constexpr uint64_t UNEXPECTED_BYTES_MAX = 64u << 20;
// Waits that were interrupted and whose replies are still due. Below what the executor keeps for a client.
constexpr size_t LEFT_MAX = ASKS_UNBOUND_MAX / 2;

// How many tensors the answer to an Ask gives.
uint32_t count_made(Reader& in, bool in_list = false) {
  switch (static_cast<OutputKind>(in.u8())) {
    case OutputKind::None:
      return 0;
    case OutputKind::New: {
      in.u8();
      in.take(2 * sizeof(int64_t) * in.u8());
      return 1;
    }
    case OutputKind::Same:
      in.u32();
      return 0;
    case OutputKind::List: {
      if (in_list) throw ProtocolError("an output is malformed");
      uint32_t count = 0, items = in.u32();
      if (items > LIST_ITEMS_MAX) throw ProtocolError("an output is a list that is longer than allowed");
      for (uint32_t left = items; left > 0; left--) count += count_made(in, true);
      return count;
    }
    case OutputKind::Integer:
    case OutputKind::Float:
      in.take(8);
      return 0;
    case OutputKind::Boolean:
      in.u8();
      return 0;
    case OutputKind::Complex:
      in.take(16);
      return 0;
  }
  throw ProtocolError("an output is of an unknown kind");
}

uint32_t count_made_in(const std::vector<uint8_t>& answer) {
  Reader in(answer.data(), answer.size());
  uint32_t count = 0;
  for (uint32_t left = in.u32(); left > 0; left--) count += count_made(in);
  return count;
}

}  // namespace

int64_t Connection::spin_us() {
  static const int64_t found = std::thread::hardware_concurrency() >= SPIN_CORES_MIN ? SPIN_US : 0;
  return found;
}

// --- waiting ------------------------------------------------------------------------------------

void Connection::wait_until(std::unique_lock<std::mutex>& lock, c10::function_ref<bool()> done) {
  auto started = Clock::now(), signals_heard = started;
  auto limit = std::chrono::duration<double>(options_.op_timeout_s);
  while (!done()) {
    if (lost_) {
      lock.unlock();
      raise_lost();
    }
    auto now = Clock::now();
    if (is_recorder()) recorder_seen_ = now;
    if (now - signals_heard > SIGNALS_EVERY) {
      lock.unlock();
      check_signals();
      lock.lock();
      signals_heard = now;
      continue;
    }
    if (broken_) {
      changed_.wait_for(lock, OTHERS_READ_FOR);
      started = now;  // resuming has a limit of its own
      continue;
    }
    if (now - std::max(started, last_heard_.load()) > limit) {
      lock.unlock();
      give_up("it has not answered for " + std::to_string(options_.op_timeout_s) + " s");
      lock.lock();
      continue;
    }
    if (!frames_.empty() && frames_.front().number <= acknowledged_) {
      changed_.wait_for(lock, OTHERS_READ_FOR);  // whoever has sent it is about to note that
      continue;
    }
    lock.unlock();
    bool mine = try_read(READ_SLICE_US);
    lock.lock();
    if (mine || done() || lost_) continue;
    waiting_to_read_++;
    changed_.wait_for(lock, OTHERS_READ_FOR);
    waiting_to_read_--;
  }
}

void Connection::wait_landed(uint64_t more_bytes) {
  LetInterpreterGo go;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(lock, [&] {
    bool room = landing_bytes_ + more_bytes <= LANDING_BYTES_MAX && landings_.size() < LANDINGS_MAX;
    return landings_.empty() || room;
  });
}

void Connection::await(uint64_t number, Awaited& awaited) {
  LetInterpreterGo go;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    wait_until(lock, [&] { return awaited.done; });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    leave(lock, number, awaited);
    throw;
  }
  lock.unlock();
  if (awaited.kind != ReplyKind::Reply) raise_reply(awaited);
}

// Nobody waits any more, be it that the connection is lost or that a signal came: `awaited` and what it
// points to are about to go. The reply may still come, and its end is read past.
void Connection::leave(std::unique_lock<std::mutex>& lock, uint64_t number, Awaited& awaited) {
  bool due = awaited_.erase(number) > 0;
  leaving_++;
  changed_.wait(lock, [&] { return filling_ != &awaited; });
  leaving_--;
  if (lost_) return;
  std::string over;
  try {
    if (due) {
      left_[number] = {awaited.into_bytes, awaited.binds};
    } else if (awaited.binds && awaited.kind == ReplyKind::Reply) {
      leave_unbound(number, count_made_in(awaited.payload));
    }
    if (left_.size() > LEFT_MAX) {
      over = "it has not answered, and " + std::to_string(LEFT_MAX) + " waits for it were interrupted";
    }
  } catch (const ProtocolError& error) {
    over = std::string("it does not keep to the wire: ") + error.what();
  }
  lock.unlock();
  if (!over.empty()) give_up(over);
}

void Connection::drop_answer(uint64_t number, uint32_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  leave_unbound(number, count);
}

void Connection::leave_unbound(uint64_t number, uint32_t count) {
  if (count) unbound_.emplace_back(number, count);
  free_unbound();
}

// What an Ask gave and nobody wants is bound, and freed at once. Not while a graph is recorded, which would
// get it for one of its steps.
void Connection::free_unbound() {
  if (recording_ || lost_) return;
  while (!unbound_.empty()) {
    auto [number, count] = unbound_.back();
    if (free_storages_.size() + (STORAGES_MAX - next_storage_) < count) return;  // there will be room later
    std::vector<uint32_t> storages(count);
    for (uint32_t& storage : storages) storage = next_free_storage();
    records_.record(Record::Bind, count);
    records_.u64(number);
    records_.raw(storages.data(), storages.size() * sizeof(uint32_t));
    for (uint32_t storage : storages) {
      records_.record(Record::Free);
      records_.u32(storage);
    }
    free_storages_.insert(free_storages_.end(), storages.begin(), storages.end());
    records_pending_++;
    unbound_.pop_back();
  }
  if (sender_asleep_) wake_sender();
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

// --- reading ------------------------------------------------------------------------------------

// True when this thread was the one that read, or tried to.
bool Connection::try_read(int64_t timeout_us) {
  std::unique_lock<std::mutex> reading(read_mutex_, std::try_to_lock);
  if (!reading) return false;
  if (!stream_) return true;  // it has just been closed
  bool came = true;
  try {
    came = read_reply(timeout_us);
    // What has come with the first reply is read as well, without waiting for more.
    while (came && read_end_ - read_start_ >= sizeof(ReplyHeader) && read_reply(0)) {
    }
  } catch (const ProtocolError& error) {
    give_up(std::string("it does not keep to the wire: ") + error.what());
  } catch (const std::exception& error) {
    broke(error.what());
  }
  reading.unlock();
  std::vector<Parcel> over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over.swap(landed_);
    if (came || waiting_to_read_ > 0) changed_.notify_all();
  }
  unship(over);
  return true;
}

bool Connection::fill(size_t need, int64_t timeout_us) {
  while (read_end_ - read_start_ < need) {
    if (read_start_ == read_end_) read_start_ = read_end_ = 0;
    if (read_buffer_.size() - read_start_ < need) {
      std::memmove(read_buffer_.data(), read_buffer_.data() + read_start_, read_end_ - read_start_);
      read_end_ -= read_start_;
      read_start_ = 0;
    }
    size_t room = read_buffer_.size() - read_end_;
    size_t got = stream_->read_soon(read_buffer_.data() + read_end_, room, timeout_us, spin_us());
    if (got == 0) return false;
    read_end_ += got;
    heard();
  }
  return true;
}

// A reply that has come only in part is kept, and the next call goes on with it.
bool Connection::read_reply(int64_t timeout_us) {
  if (!incoming_.open) {
    if (!fill(sizeof(ReplyHeader), timeout_us)) return false;
    ReplyHeader header;
    std::memcpy(&header, read_buffer_.data() + read_start_, sizeof header);
    read_start_ += sizeof header;
    if (header.kind == ReplyKind::Acknowledge) {
      if (header.bytes) throw ProtocolError("an acknowledgement has a payload");
      std::lock_guard<std::mutex> lock(mutex_);
      check_acknowledged(header.frames_received);
      acknowledge(header.frames_received);
      return true;
    }
    begin_payload(header);
  }
  while (incoming_.at < incoming_.header.bytes) {
    if (!read_payload(timeout_us)) return false;
  }
  incoming_.open = false;
  if (incoming_.header.kind == ReplyKind::Farewell) {
    take_farewell();
  } else {
    deliver();
  }
  return true;
}

void Connection::check_acknowledged(uint64_t frames_received) const {
  if (frames_received > frames_made_) throw ProtocolError("it has frames that were never sent");
}

void Connection::begin_payload(const ReplyHeader& header) {
  if (header.kind != ReplyKind::Farewell && header.kind != ReplyKind::Reply &&
      header.kind != ReplyKind::Error) {
    throw ProtocolError("a reply is of an unknown kind");
  }
  uint64_t into_bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (header.kind != ReplyKind::Farewell && header.number > replies_asked_) {
      throw ProtocolError("a reply came that nobody had asked for");
    }
    auto found = awaited_.find(header.number);
    auto left = left_.find(header.number);
    if (found != awaited_.end()) into_bytes = found->second->into_bytes;
    if (left != left_.end()) into_bytes = left->second.into_bytes;
  }
  bool into = header.kind == ReplyKind::Reply && into_bytes;
  if (into && header.bytes != into_bytes) throw ProtocolError("a reply has another size than was due");
  if (!into && header.bytes > UNEXPECTED_BYTES_MAX) throw ProtocolError("a reply is larger than allowed");
  incoming_ = {header, 0, into, true, {}};
  if (!into) incoming_.payload.resize(header.bytes);
}

// Some of it. A caller's memory is written to only between these two locks, so that he can leave.
bool Connection::read_payload(int64_t timeout_us) {
  uint8_t* target = incoming_.payload.data();
  uint64_t left = incoming_.header.bytes - incoming_.at;
  size_t here = std::min<size_t>(left, read_end_ - read_start_);
  if (incoming_.into) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = awaited_.find(incoming_.header.number);
    if (found != awaited_.end()) filling_ = found->second;
    target = filling_ ? static_cast<uint8_t*>(filling_->into) : nullptr;
  }
  struct Filled {
    Connection& connection;
    ~Filled() {
      std::lock_guard<std::mutex> lock(connection.mutex_);
      connection.filling_ = nullptr;
      if (connection.leaving_) connection.changed_.notify_all();
    }
  } filled{*this};
  if (here > 0) {
    if (target) std::memcpy(target + incoming_.at, read_buffer_.data() + read_start_, here);
    read_start_ += here;
    incoming_.at += here;
    return true;
  }
  size_t got = target ? stream_->read_soon(target + incoming_.at, left, timeout_us, spin_us())
                      : stream_->read_some(read_buffer_.data(), std::min<size_t>(left, READ_BUFFER_BYTES),
                                           timeout_us);  // nobody wants it; the buffer is empty
  incoming_.at += got;
  if (got) heard();
  return got > 0;
}

void Connection::take_farewell() {
  Reader reader(incoming_.payload.data(), incoming_.payload.size());
  std::string code = reader.text(), op = reader.text();
  reader.u64();
  std::string said = reader.text() + " (" + code + ")";
  for (char& each : said)
    if (static_cast<unsigned char>(each) >= 0x80) each = '?';
  give_up(said);
}

void Connection::deliver() {
  const ReplyHeader& header = incoming_.header;
  std::lock_guard<std::mutex> lock(mutex_);
  check_acknowledged(header.frames_received);
  acknowledge(header.frames_received);
  if (header.number != replies_received_ + 1) throw ProtocolError("a reply is missing or came twice");
  replies_received_ = header.number;
  auto left = left_.find(header.number);
  if (left != left_.end()) {
    bool binds = left->second.binds && header.kind == ReplyKind::Reply;
    left_.erase(left);
    if (binds) leave_unbound(header.number, count_made_in(incoming_.payload));
  }
  auto found = awaited_.find(header.number);
  if (found == awaited_.end()) return;
  Awaited* awaited = found->second;
  awaited->payload = std::move(incoming_.payload);
  awaited->kind = header.kind;
  awaited->done = true;
  awaited_.erase(found);
}

void Connection::synchronize() {
  check_not_recording("waiting");
  Awaited awaited;
  Batch batch(*this);
  batch.records().record(Record::Sync);
  uint64_t number = batch.finish_ask(awaited);
  await(number, awaited);
}

}  // namespace genie
