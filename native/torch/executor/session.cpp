#include "session.h"

#include <chrono>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace genie {

namespace {

constexpr int64_t FOREVER = -1;
// After so long without a frame the client is told what has arrived.
constexpr int64_t SILENCE_US = 2000;

// How often it is looked after the client while another executor is waited for, and how often the client
// hears something, so that it does not take this one for dead.
constexpr auto LOOK_EVERY = std::chrono::milliseconds(200);
constexpr auto SPEAK_EVERY = std::chrono::seconds(1);
// What failures of copies between executors name as their op.
constexpr const char* COPY = "copy between devices";
constexpr const char* MEMORY = "memory for a tensor";

bool is_land(const uint8_t* records, size_t bytes) {
  return bytes >= sizeof(uint32_t) &&
         Reader(records, bytes).u32() >> 24 == static_cast<uint32_t>(Record::Land);
}

// What the thread that serves needs: the device, and nothing of autograd, which is the client's.
struct ServingThread {
  explicit ServingThread(c10::Device device) : device_guard(device) {}

  c10::DeviceGuard device_guard;
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

}  // namespace

Session::Session(const std::string& device, uint64_t bytes_max, std::vector<std::string> allowed_ops,
                 int64_t spin_us, std::shared_ptr<Capture> capture, std::shared_ptr<Compiler> compiler,
                 Fetch fetch)
    : device_(device),
      storages_(device_, bytes_max),
      copies_(device_),
      outbox_(storages_, copies_, spin_us),
      generators_(device_),
      ops_(storages_, generators_, outbox_),
      graphs_(storages_, ops_, outbox_, std::move(capture), std::move(compiler)),
      reader_(device_, std::move(allowed_ops)),
      upload_(copies_),
      shelf_(device_, storages_),
      landing_(copies_, std::move(fetch)),
      spin_us_(spin_us) {}

Outcome Session::serve(std::shared_ptr<Stream> stream, uint64_t replies_received) {
  std::unique_lock<std::mutex> only_one(serving_, std::try_to_lock);
  if (!only_one) throw std::logic_error("the session is being served already");
  ServingThread thread(device_);
  Outcome outcome;
  try {
    outcome = serve_frames(*stream, replies_received);
  } catch (const ConnectionLost&) {
    outcome = Outcome::Lost;
  } catch (...) {
    outbox_.say_farewell(last_words());
    outcome = Outcome::Fatal;
  }
  outbox_.disconnect();
  return outcome;
}

SessionStats Session::stats() const {
  const MemoryCounters& memory = storages_.counters();
  return {memory.storages, storages_.bytes_in_use(), memory.bytes_peak, storages_.bytes_max(),
          ops_.count(),    frames_received(),        shelf_.count()};
}

void Session::close() {
  std::unique_lock<std::mutex> only_one(serving_, std::try_to_lock);
  if (!only_one) throw std::logic_error("the session is being served");
  shelf_.close();
  upload_.abandon();
  graphs_.clear();
  ops_.clear();
  templates_.clear();
  outbox_.clear();
  storages_.clear();
  generators_.clear();
}

// --- frames -------------------------------------------------------------------------------------

Outcome Session::serve_frames(Stream& stream, uint64_t replies_received) {
  Inbox inbox(stream, spin_us_);
  outbox_.connect(stream, replies_received);
  while (!outbox_.lost()) {
    if (!take_frame(inbox, next_header(inbox))) {
      outbox_.acknowledge();
      return Outcome::Goodbye;
    }
    outbox_.acknowledge_if_due();
  }
  return Outcome::Lost;
}

FrameHeader Session::next_header(Inbox& inbox) {
  if (outbox_.owes_acknowledgement() && !inbox.wait(SILENCE_US)) outbox_.acknowledge();
  inbox.wait(FOREVER);
  return inbox.read_header();
}

bool Session::take_frame(Inbox& inbox, const FrameHeader& header) {
  uint64_t due = outbox_.frames_received() + 1;
  if (header.number > due) {
    throw ProtocolError("frame " + std::to_string(header.number) + " came where " + std::to_string(due) +
                        " was due");
  }
  outbox_.replies_received(header.replies_received);
  if (header.number < due) {  // it had arrived before the connection was cut
    inbox.skip(header.bytes);
    return true;
  }
  if (header.kind == FrameKind::Bytes) {
    take_bytes(inbox, header);
    return true;
  }
  if (header.kind != FrameKind::Records) throw ProtocolError("a frame is of an unknown kind");
  if (upload_.under_way()) throw ProtocolError("records came in the middle of an upload");
  const uint8_t* records = inbox.read_payload(header.bytes);
  if (is_land(records, header.bytes)) {
    land(Reader(records + sizeof(uint32_t), header.bytes - sizeof(uint32_t)), inbox);
    outbox_.frame_received(header.number, header.bytes);
    outbox_.acknowledge();  // the client lets no more than so much be on its way
    return true;
  }
  outbox_.frame_received(header.number, header.bytes);
  return take_records(records, header.bytes);
}

void Session::take_bytes(Inbox& inbox, const FrameHeader& header) {
  inbox.read_into(upload_.place(header.bytes), header.bytes);
  outbox_.frame_received(header.number, header.bytes);
  attempt([&] { upload_.arrived(header.bytes); });
  if (!upload_.under_way()) outbox_.acknowledge();  // the client may be waiting to have its memory back
}

bool Session::take_records(const uint8_t* records, size_t bytes) {
  Reader in(records, bytes);
  while (in.left() > 0) {
    uint32_t head = in.u32();
    auto kind = static_cast<Record>(head >> 24);
    uint32_t argument = head & RECORD_ARGUMENT_MAX;
    if (kind == Record::Op) {
      run_op(known_template(argument), in);
      continue;
    }
    bool last = kind == Record::Goodbye;
    if (!last) take_record(kind, argument, in);
    bool more = in.left() > 0;
    if (more && (last || upload_.under_way())) throw ProtocolError("a record came after the last one");
    if (last) return false;
  }
  return true;
}

// Outside of Op and what cannot change a graph, nothing may come between its begin and its end.
void Session::check_recordable(Record kind) const {
  bool fits = kind == Record::Allocate || kind == Record::Free || kind == Record::Template ||
              kind == Record::Forget || kind == Record::Ask || kind == Record::Bind ||
              kind == Record::GraphStep || kind == Record::GraphEnd || kind == Record::Unship;
  if (graphs_.recording() && !fits) throw ProtocolError("a record came that cannot be part of a graph");
}

void Session::take_record(Record kind, uint32_t argument, Reader& in) {
  check_recordable(kind);
  switch (kind) {
    case Record::Ask:
      return ask(*known_template(argument), in);
    case Record::Bind: {
      uint64_t number = in.u64();
      return ops_.bind(number, argument, in);
    }
    case Record::Template:
      return add_template(argument, in);
    case Record::Forget:
      return forget_template(argument);
    case Record::Allocate:
      return allocate(in);
    case Record::Free:
      return free(in.u32());
    case Record::Resize:
      return resize(in);
    case Record::Put:
      return put(argument == 1, in);
    case Record::Get:
      return get(in);
    case Record::Sync:
      return synchronize();
    case Record::Seed: {
      uint32_t generator = in.u32();
      return generators_.seed(generator, in.u64());
    }
    case Record::GeneratorState:
      return reply_generator_state(in.u32());
    case Record::SetGenerator:
      return set_generator(in);
    case Record::FreeGenerator:
      return generators_.free(in.u32());
    case Record::Stats:
      return reply_stats(/*forget_peak=*/argument == 1);
    case Record::Ship:
      return ship(in);
    case Record::Unship:
      return shelf_.drop(in.u64());
    case Record::Land:
      throw ProtocolError("a Land is not alone in its frame");
    default:
      return take_graph_record(kind, argument, in);
  }
}

void Session::take_graph_record(Record kind, uint32_t argument, Reader& in) {
  switch (kind) {
    case Record::GraphBegin:
      return graphs_.begin(in.u32());
    case Record::GraphEnd:
      return graphs_.end(argument);
    case Record::GraphStep:
      return write_down(known_template(argument), in);
    case Record::GraphReplay:
      return note(graphs_.replay(in.u32()));
    case Record::GraphResult: {
      uint32_t result = in.u32();
      return note(graphs_.take_result(result, in.u32()));
    }
    case Record::GraphFree:
      return graphs_.free(in.u32());
    case Record::GraphReport:
      return reply_report(in.u32());
    default:
      throw ProtocolError("a record is of an unknown kind");
  }
}

// --- what can fail ------------------------------------------------------------------------------

void Session::note(FailurePtr failure) {
  if (failure && !first_failure_) first_failure_ = std::move(failure);
}

template <class Work>
void Session::attempt(Work work) {
  try {
    work();
  } catch (const Poisoned&) {
    // The client has been, or will be, told of what that goes back to.
  } catch (...) {
    note(failure_at_hand("", ops_.count()));
  }
}

template <class Work>
void Session::answer(Work work) {
  FailurePtr failure;
  if (first_failure_) {
    std::swap(failure, first_failure_);
  } else {
    try {
      return work();
    } catch (...) {
      failure = failure_at_hand("", ops_.count());
    }
  }
  outbox_.reply_error(*failure);
}

// --- templates and ops --------------------------------------------------------------------------

void Session::run_op(const std::shared_ptr<Template>& call, Reader& in) {
  Reader start = in;
  note(ops_.run(*call, in));
  if (!graphs_.recording()) return;
  size_t bytes = start.left() - in.left();
  graphs_.op(call, start.take(bytes), bytes);
}

void Session::write_down(const std::shared_ptr<Template>& call, Reader& in) {
  if (!graphs_.recording() || !call->predicted) throw ProtocolError("a step came outside of a graph");
  size_t bytes = call->data_bytes + sizeof(uint32_t) * call->new_outputs;
  graphs_.op(call, in.take(bytes), bytes);
}

const std::shared_ptr<Template>& Session::known_template(uint32_t number) {
  if (number >= templates_.size() || !templates_[number]) {
    throw ProtocolError("template " + std::to_string(number) + " is not known to this session");
  }
  return templates_[number];
}

void Session::add_template(uint32_t number, Reader& in) {
  if (number >= TEMPLATES_MAX) {
    throw ProtocolError("template " + std::to_string(number) + " is beyond the last one");
  }
  if (number >= templates_.size()) templates_.resize(number + 1);
  if (templates_[number]) throw ProtocolError("template " + std::to_string(number) + " is in use already");
  uint32_t bytes = in.u32();
  Reader body(in.take(bytes), bytes);
  auto made = reader_.read(body);
  *template_nodes_ += made->nodes;
  templates_[number] = std::shared_ptr<Template>(made.release(), [nodes = template_nodes_](Template* dead) {
    *nodes -= dead->nodes;
    delete dead;
  });
  if (*template_nodes_ > TEMPLATE_NODES_MAX) throw ProtocolError("the templates hold more than is allowed");
}

void Session::forget_template(uint32_t number) {
  known_template(number);
  templates_[number].reset();
}

void Session::ask(Template& call, Reader& in) {
  if (first_failure_) {
    ops_.pass_over(call, in);
    return answer([] {});
  }
  Writer reply;
  FailurePtr failure = ops_.ask(call, in, outbox_.next_number(), reply);
  if (failure) {
    outbox_.reply_error(*failure);
  } else {
    outbox_.reply(reply);
  }
}

// --- memory -------------------------------------------------------------------------------------

void Session::allocate(Reader& in) {
  uint32_t storage = in.u32();
  uint64_t bytes = in.u64();
  storages_.check_free(storage);
  if (bytes > INT64_MAX) throw ProtocolError("a storage is larger than can be counted");
  if (graphs_.recording()) graphs_.allocated(storage, bytes);
  try {
    storages_.allocate(storage, bytes);
  } catch (...) {
    FailurePtr failure = failure_at_hand(MEMORY, ops_.count());
    storages_.poison(storage, failure);
    note(failure);
  }
}

void Session::resize(Reader& in) {
  uint32_t storage = in.u32();
  Slot& slot = storages_.known(storage);
  uint64_t bytes = in.u64();
  if (bytes > INT64_MAX) throw ProtocolError("a storage is larger than can be counted");
  if (slot.failure) return;
  graphs_.before_free(storage, slot);
  graphs_.moved(storage);
  try {
    storages_.resize(slot, bytes);
  } catch (...) {
    // The client takes it for larger than it is, so it cannot be used any more.
    FailurePtr failure = failure_at_hand(MEMORY, ops_.count());
    storages_.spoil(slot, failure);
    note(failure);
  }
}

void Session::free(uint32_t storage) {
  Slot& slot = storages_.known(storage);
  graphs_.before_free(storage, slot);
  storages_.free(storage);
  if (graphs_.recording()) {
    graphs_.freed(storage);
  } else {
    graphs_.let_go(storage);
  }
}

// --- uploads ------------------------------------------------------------------------------------

void Session::put(bool inside, Reader& in) {
  View view = read_view(in);
  uint64_t bytes = in.u64();
  if (bytes != view.look.content_bytes) throw ProtocolError("an upload has another size than its tensor");
  if (inside && bytes > INLINE_BYTES_MAX) throw ProtocolError("an upload is too large for a record");
  const uint8_t* data = inside ? in.take(bytes) : nullptr;
  storages_.known(view.storage);
  upload_.begin({}, {}, bytes);  // to be thrown away, unless all goes well
  attempt([&] { begin_upload(view, bytes); });
  if (inside || bytes == 0) attempt([&] { upload_.fill(data); });
}

void Session::begin_upload(const View& view, uint64_t bytes) {
  Slot& slot = storages_.known(view.storage);
  at::Tensor target = storages_.view(slot, view.look, view.offset);
  outbox_.before_write(slot.storage);
  upload_.begin(target, staged_for(target, view), bytes);
}

at::Tensor Session::staged_for(const at::Tensor& target, const View& view) {
  if (target.is_contiguous() && view.look.flags == 0) return target;
  storages_.check_room(view.look.content_bytes);  // an expanded tensor is larger than its storage
  return at::empty(target.sizes(), target.options());
}

// --- copies between executors -------------------------------------------------------------------

void Session::ship(Reader& in) {
  uint64_t number = in.u64();
  View view = read_view(in);
  shelf_.check_number(number);
  Slot& slot = storages_.known(view.storage);
  try {
    shelf_.check_place();
    const at::Tensor& source = storages_.view(slot, view.look, view.offset);
    storages_.check_room(view.look.content_bytes);
    // A copy: the client may write to the source at once, and nobody here waits for the other executor.
    at::Tensor own = at::empty(source.sizes(), source.options());
    own.copy_(source);
    shelf_.put(number, std::move(own));
  } catch (const Poisoned& poisoned) {
    shelf_.put(number, poisoned.failure);
  } catch (...) {
    FailurePtr failure = failure_at_hand(COPY, ops_.count());
    shelf_.put(number, failure);
    note(failure);
  }
}

// The client's connection may break meanwhile: then this ends, and is done anew when the frame comes again.
void Session::land(Reader in, Inbox& inbox) {
  check_recordable(Record::Land);
  View view = read_view(in);
  uint64_t bytes = in.u64();
  Origin origin = read_origin(in);
  if (in.left() > 0) throw ProtocolError("a Land is not alone in its frame");
  if (bytes != view.look.content_bytes) throw ProtocolError("a copy has another size than its tensor");
  Slot& slot = storages_.known(view.storage);
  if (slot.failure) return;  // the client was told
  auto now = std::chrono::steady_clock::now();
  auto meanwhile = [&, look = now + LOOK_EVERY, speak = now + SPEAK_EVERY]() mutable {
    auto now = std::chrono::steady_clock::now();
    if (now < look) return;
    look = now + LOOK_EVERY;
    inbox.look();
    if (now < speak) return;
    speak = now + SPEAK_EVERY;
    outbox_.acknowledge();
    if (outbox_.lost()) throw ConnectionLost("the client has left");
  };
  try {
    at::Tensor target = storages_.view(slot, view.look, view.offset);
    outbox_.before_write(slot.storage);
    try {
      landing_.run(origin, target, staged_for(target, view), bytes, meanwhile);
    } catch (const CopyFailed& failed) {
      throw CopyFailed(failed.code, "could not copy from " + origin.source + " at " + origin.host + ":" +
                                        std::to_string(origin.port) + ": " + failed.what() +
                                        "; the tensor that was to be filled is lost with all its views: make "
                                        "it anew, or copy by way of the CPU");
    }
  } catch (const ConnectionLost&) {
    throw;
  } catch (...) {
    FailurePtr failure = failure_at_hand(COPY, ops_.count());
    graphs_.before_free(view.storage, slot);
    graphs_.moved(view.storage);
    storages_.spoil(slot, failure);
    note(failure);
  }
}

// --- replies ------------------------------------------------------------------------------------

void Session::get(Reader& in) {
  View view = read_view(in);
  Slot& slot = storages_.known(view.storage);
  answer([&] {
    const at::Tensor& source = storages_.view(slot, view.look, view.offset);
    bool plain = source.is_contiguous() && view.look.flags == 0;
    if (!plain) storages_.check_room(view.look.content_bytes);
    outbox_.reply_tensor(plain ? source : source.resolve_conj().resolve_neg().contiguous(), /*own=*/!plain);
  });
}

void Session::synchronize() {
  answer([&] {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    outbox_.reply(Writer());
  });
}

void Session::set_generator(Reader& in) {
  uint32_t generator = in.u32(), bytes = in.u32();
  const uint8_t* state = in.take(bytes);
  attempt([&] { generators_.set_state(generator, state, bytes); });
}

void Session::reply_generator_state(uint32_t generator) {
  answer([&] { outbox_.reply_tensor(generators_.state(generator).contiguous(), /*own=*/true); });
}

void Session::reply_stats(bool forget_peak) {
  answer([&] {
    SessionStats now = stats();
    if (forget_peak) storages_.forget_peak();
    Writer payload;
    payload.u64(now.storages);
    payload.u64(now.bytes_allocated);
    payload.u64(now.bytes_allocated_peak);
    payload.u64(now.bytes_max);
    payload.u64(now.ops);
    outbox_.reply(payload);
  });
}

void Session::reply_report(uint32_t graph) {
  answer([&] {
    GraphReport report = graphs_.report(graph);
    Writer payload;
    payload.u8(static_cast<uint8_t>(report.how));
    payload.u64(report.replays);
    payload.text(report.why);
    outbox_.reply(payload);
  });
}

}  // namespace genie
