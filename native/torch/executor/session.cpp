#include "session.h"

#include <chrono>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace genie {

namespace {

constexpr int64_t NO_TIMEOUT = -1;
// Frames are acknowledged after this time without a new one.
constexpr int64_t ACKNOWLEDGE_IDLE_US = 2000;

// While fetching a parcel: how often the client's connection is checked, and how often the client gets an
// acknowledgement, so that it does not time out.
constexpr auto CLIENT_CHECK_INTERVAL = std::chrono::milliseconds(200);
constexpr auto KEEP_ALIVE_INTERVAL = std::chrono::seconds(1);
// Op names in failures that are not of an op.
constexpr const char* COPY_OP = "copy between devices";
constexpr const char* ALLOCATE_OP = "memory for a tensor";

bool is_fetch_parcel(const uint8_t* records, size_t bytes) {
  return bytes >= sizeof(uint32_t) &&
         Reader(records, bytes).u32() >> 24 == static_cast<uint32_t>(Record::FetchParcel);
}

// State of the serving thread: the device, and no autograd, which runs on the client.
struct ServingThreadGuards {
  explicit ServingThreadGuards(c10::Device device) : device_guard(device) {}

  c10::DeviceGuard device_guard;
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

}  // namespace

Session::Session(const std::string& device, uint64_t bytes_max, std::vector<std::string> allowed_ops,
                 int64_t spin_us, std::shared_ptr<Capture> capture, std::shared_ptr<Compiler> compiler,
                 ParcelConnector connector)
    : device_(device),
      storages_(device_, bytes_max),
      staging_(device_),
      replies_(storages_, staging_, spin_us),
      generators_(device_),
      ops_(storages_, generators_, replies_),
      graphs_(storages_, ops_, replies_, std::move(capture), std::move(compiler)),
      reader_(device_, std::move(allowed_ops)),
      upload_(staging_),
      parcels_(device_, storages_),
      fetcher_(staging_, std::move(connector)),
      spin_us_(spin_us) {}

Outcome Session::serve(std::shared_ptr<Stream> stream, uint64_t replies_received) {
  std::unique_lock<std::mutex> serve_lock(serve_mutex_, std::try_to_lock);
  if (!serve_lock) throw std::logic_error("the session is already being served");
  ServingThreadGuards thread(device_);
  Outcome outcome;
  try {
    outcome = serve_frames(*stream, replies_received);
  } catch (const ConnectionLost&) {
    outcome = Outcome::Lost;
  } catch (...) {
    replies_.send_fatal(fatal_failure());
    outcome = Outcome::Fatal;
  }
  replies_.disconnect();
  return outcome;
}

SessionStats Session::stats() const {
  const MemoryCounters& memory = storages_.counters();
  return {memory.storages, storages_.bytes_in_use(), memory.bytes_peak, storages_.bytes_max(),
          ops_.count(),    frames_received(),        parcels_.count(),  parcels_.pending_fetches()};
}

void Session::close() {
  std::unique_lock<std::mutex> serve_lock(serve_mutex_, std::try_to_lock);
  if (!serve_lock) throw std::logic_error("the session is being served");
  parcels_.close();
  upload_.discard();
  graphs_.clear();
  ops_.clear();
  templates_.clear();
  replies_.clear();
  storages_.clear();
  generators_.clear();
}

// --- frames -------------------------------------------------------------------------------------

Outcome Session::serve_frames(Stream& stream, uint64_t replies_received) {
  FrameReader frames(stream, spin_us_);
  replies_.connect(stream, replies_received);
  while (!replies_.lost()) {
    if (!handle_frame(frames, next_header(frames))) {
      replies_.acknowledge();
      return Outcome::Closed;
    }
    replies_.acknowledge_if_due();
  }
  return Outcome::Lost;
}

FrameHeader Session::next_header(FrameReader& frames) {
  if (replies_.has_unacknowledged_frames() && !frames.wait(ACKNOWLEDGE_IDLE_US)) replies_.acknowledge();
  frames.wait(NO_TIMEOUT);
  return frames.read_header();
}

bool Session::handle_frame(FrameReader& frames, const FrameHeader& header) {
  uint64_t expected = replies_.frames_received() + 1;
  if (header.number > expected) {
    throw ProtocolError("frame " + std::to_string(header.number) + " received, expected " +
                        std::to_string(expected));
  }
  replies_.release_replies(header.replies_received);
  if (header.number < expected) {  // received before the connection broke
    frames.skip(header.bytes);
    return true;
  }
  if (header.kind == FrameKind::Bytes) {
    handle_bytes(frames, header);
    return true;
  }
  if (header.kind != FrameKind::Records) throw ProtocolError("a frame has an unknown kind");
  if (upload_.in_progress()) throw ProtocolError("records received in the middle of an upload");
  const uint8_t* records = frames.read_payload(header.bytes);
  if (is_fetch_parcel(records, header.bytes)) {
    fetch_parcel(Reader(records + sizeof(uint32_t), header.bytes - sizeof(uint32_t)), frames);
    replies_.count_frame(header.number, header.bytes);
    replies_.acknowledge();  // the client limits how much is unacknowledged
    return true;
  }
  replies_.count_frame(header.number, header.bytes);
  return handle_records(records, header.bytes);
}

void Session::handle_bytes(FrameReader& frames, const FrameHeader& header) {
  frames.read_into(upload_.destination(header.bytes), header.bytes);
  replies_.count_frame(header.number, header.bytes);
  run_without_reply([&] { upload_.advance(header.bytes); });
  if (!upload_.in_progress()) replies_.acknowledge();  // the client may be waiting to release its memory
}

bool Session::handle_records(const uint8_t* records, size_t bytes) {
  Reader in(records, bytes);
  while (in.remaining() > 0) {
    uint32_t head = in.u32();
    auto kind = static_cast<Record>(head >> 24);
    uint32_t argument = head & RECORD_ARGUMENT_MAX;
    if (kind == Record::Op) {
      run_op(get_template(argument), in);
      continue;
    }
    bool last = kind == Record::CloseSession;
    if (!last) handle_record(kind, argument, in);
    bool more = in.remaining() > 0;
    if (more && (last || upload_.in_progress()))
      throw ProtocolError("a record follows the last one of its frame");
    if (last) return false;
  }
  return true;
}

// Only Op and records that do not affect a recorded graph are allowed between GraphBegin and GraphEnd.
void Session::check_recordable(Record kind) const {
  bool fits = kind == Record::Allocate || kind == Record::Free || kind == Record::DefineTemplate ||
              kind == Record::DropTemplate || kind == Record::DynamicOp || kind == Record::BindOutputs ||
              kind == Record::GraphStep || kind == Record::GraphEnd || kind == Record::DropParcel;
  if (graphs_.recording() && !fits)
    throw ProtocolError("a record is not allowed while a graph is being recorded");
}

void Session::handle_record(Record kind, uint32_t argument, Reader& in) {
  check_recordable(kind);
  switch (kind) {
    case Record::DynamicOp:
      return run_dynamic_op(*get_template(argument), in);
    case Record::BindOutputs: {
      uint64_t number = in.u64();
      return ops_.bind(number, argument, in);
    }
    case Record::DefineTemplate:
      return define_template(argument, in);
    case Record::DropTemplate:
      return drop_template(argument);
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
      return reply_stats(/*reset_peak=*/argument == 1);
    case Record::PublishParcel:
      return publish_parcel(in);
    case Record::DropParcel:
      return parcels_.drop(in.u64());
    case Record::FetchParcel:
      throw ProtocolError("a FetchParcel is not alone in its frame");
    default:
      return handle_graph_record(kind, argument, in);
  }
}

void Session::handle_graph_record(Record kind, uint32_t argument, Reader& in) {
  switch (kind) {
    case Record::GraphBegin:
      return graphs_.begin(in.u32());
    case Record::GraphEnd:
      return graphs_.end(argument);
    case Record::GraphStep:
      return record_graph_step(get_template(argument), in);
    case Record::GraphReplay:
      return record_failure(graphs_.replay(in.u32()));
    case Record::GraphResult: {
      uint32_t result = in.u32();
      return record_failure(graphs_.share_result(result, in.u32()));
    }
    case Record::GraphFree:
      return graphs_.free(in.u32());
    case Record::GraphReport:
      return reply_graph_report(in.u32());
    default:
      throw ProtocolError("a record has an unknown kind");
  }
}

// --- failures -----------------------------------------------------------------------------------

void Session::record_failure(FailurePtr failure) {
  if (failure && !pending_failure_) pending_failure_ = std::move(failure);
}

template <class Work>
void Session::run_without_reply(Work work, const char* op) {
  try {
    work();
  } catch (const PoisonedTensor&) {
    // The original failure has been recorded.
  } catch (...) {
    record_failure(current_failure(op, ops_.count()));
  }
}

template <class Work>
void Session::run_with_reply(Work work) {
  FailurePtr failure;
  if (pending_failure_) {
    std::swap(failure, pending_failure_);
  } else {
    try {
      return work();
    } catch (...) {
      failure = current_failure("", ops_.count());
    }
  }
  replies_.reply_error(*failure);
}

// --- templates and ops --------------------------------------------------------------------------

void Session::run_op(const std::shared_ptr<Template>& call, Reader& in) {
  Reader start = in;
  record_failure(ops_.run(*call, in));
  if (!graphs_.recording()) return;
  size_t bytes = start.remaining() - in.remaining();
  graphs_.record_op(call, start.take(bytes), bytes);
}

void Session::record_graph_step(const std::shared_ptr<Template>& call, Reader& in) {
  if (!graphs_.recording() || !call->predicted) throw ProtocolError("a GraphStep is not inside a graph");
  size_t bytes = call->data_bytes + sizeof(uint32_t) * call->new_outputs;
  graphs_.record_op(call, in.take(bytes), bytes);
}

const std::shared_ptr<Template>& Session::get_template(uint32_t number) {
  if (number >= templates_.size() || !templates_[number]) {
    throw ProtocolError("template " + std::to_string(number) + " does not exist");
  }
  return templates_[number];
}

void Session::define_template(uint32_t number, Reader& in) {
  if (number >= TEMPLATES_MAX) {
    throw ProtocolError("template " + std::to_string(number) + " is out of range");
  }
  if (number >= templates_.size()) templates_.resize(number + 1);
  if (templates_[number]) throw ProtocolError("template " + std::to_string(number) + " is already defined");
  uint32_t bytes = in.u32();
  Reader body(in.take(bytes), bytes);
  auto parsed = reader_.read(body);
  *template_nodes_ += parsed->nodes;
  templates_[number] =
      std::shared_ptr<Template>(parsed.release(), [nodes = template_nodes_](Template* dropped) {
        *nodes -= dropped->nodes;
        delete dropped;
      });
  if (*template_nodes_ > TEMPLATE_NODES_MAX) throw ProtocolError("the templates exceed the maximum size");
}

void Session::drop_template(uint32_t number) {
  get_template(number);
  templates_[number].reset();
}

void Session::run_dynamic_op(Template& call, Reader& in) {
  if (pending_failure_) {
    ops_.skip(call, in);
    return run_with_reply([] {});
  }
  Writer reply;
  FailurePtr failure = ops_.run_dynamic(call, in, replies_.next_number(), reply);
  if (failure) {
    replies_.reply_error(*failure);
  } else {
    replies_.reply(reply);
  }
}

// --- memory -------------------------------------------------------------------------------------

void Session::allocate(Reader& in) {
  uint32_t storage = in.u32();
  uint64_t bytes = in.u64();
  storages_.check_unused(storage);
  if (bytes > INT64_MAX) throw ProtocolError("the size of a storage overflows");
  if (graphs_.recording()) graphs_.record_allocate(storage, bytes);
  try {
    storages_.allocate(storage, bytes);
  } catch (...) {
    FailurePtr failure = current_failure(ALLOCATE_OP, ops_.count());
    storages_.poison(storage, failure);
    record_failure(failure);
  }
}

void Session::resize(Reader& in) {
  uint32_t storage = in.u32();
  Slot& slot = storages_.get(storage);
  uint64_t bytes = in.u64();
  if (bytes > INT64_MAX) throw ProtocolError("the size of a storage overflows");
  if (slot.failure) return;
  graphs_.before_free(storage, slot);
  graphs_.on_storage_moved(storage);
  try {
    storages_.resize(slot, bytes);
  } catch (...) {
    // The client assumes the new size, so the storage cannot be used any more.
    FailurePtr failure = current_failure(ALLOCATE_OP, ops_.count());
    storages_.poison_slot(slot, failure);
    record_failure(failure);
  }
}

void Session::free(uint32_t storage) {
  Slot& slot = storages_.get(storage);
  graphs_.before_free(storage, slot);
  storages_.free(storage);
  if (graphs_.recording()) {
    graphs_.record_free(storage);
  } else {
    graphs_.on_storage_freed(storage);
  }
}

// --- uploads ------------------------------------------------------------------------------------

void Session::put(bool is_inline, Reader& in) {
  View view = read_view(in);
  uint64_t bytes = in.u64();
  if (bytes != view.meta.content_bytes) throw ProtocolError("the size of an upload differs from its tensor");
  if (is_inline && bytes > INLINE_BYTES_MAX) throw ProtocolError("an upload is too large for a record");
  const uint8_t* data = is_inline ? in.take(bytes) : nullptr;
  storages_.get(view.storage);
  upload_.begin({}, {}, bytes);  // discarded, unless begin_upload() succeeds
  run_without_reply([&] { begin_upload(view, bytes); });
  if (is_inline || bytes == 0) run_without_reply([&] { upload_.fill(data); });
}

void Session::begin_upload(const View& view, uint64_t bytes) {
  Slot& slot = storages_.get(view.storage);
  at::Tensor target = storages_.view(slot, view.meta, view.offset);
  replies_.before_write(slot.storage);
  upload_.begin(target, staging_tensor(target, view), bytes);
}

at::Tensor Session::staging_tensor(const at::Tensor& target, const View& view) {
  if (target.is_contiguous() && view.meta.flags == 0) return target;
  storages_.check_quota(view.meta.content_bytes);  // an expanded tensor is larger than its storage
  return at::empty(target.sizes(), target.options());
}

// --- copies between executors -------------------------------------------------------------------

void Session::publish_parcel(Reader& in) {
  uint64_t number = in.u64();
  View view = read_view(in);
  parcels_.check_number(number);
  Slot& slot = storages_.get(view.storage);
  try {
    parcels_.check_capacity();
    const at::Tensor& source = storages_.view(slot, view.meta, view.offset);
    storages_.check_quota(view.meta.content_bytes);
    // A copy: the client may write to the source before the other executor has fetched it.
    at::Tensor copy = at::empty(source.sizes(), source.options());
    copy.copy_(source);
    parcels_.put(number, std::move(copy));
  } catch (const PoisonedTensor& poisoned) {
    parcels_.put(number, poisoned.failure);
  } catch (...) {
    FailurePtr failure = current_failure(COPY_OP, ops_.count());
    parcels_.put(number, failure);
    record_failure(failure);
  }
}

// If the client's connection breaks, the fetch is cancelled and starts again when the client resends the
// frame.
void Session::fetch_parcel(Reader in, FrameReader& frames) {
  check_recordable(Record::FetchParcel);
  View view = read_view(in);
  uint64_t bytes = in.u64();
  ParcelOrigin origin = read_origin(in);
  if (in.remaining() > 0) throw ProtocolError("a FetchParcel is not alone in its frame");
  if (bytes != view.meta.content_bytes) throw ProtocolError("the size of a copy differs from its tensor");
  Slot& slot = storages_.get(view.storage);
  if (slot.failure) return;  // already reported
  auto now = std::chrono::steady_clock::now();
  auto keep_alive = [&, next_check = now + CLIENT_CHECK_INTERVAL,
                     next_keep_alive = now + KEEP_ALIVE_INTERVAL]() mutable {
    auto now = std::chrono::steady_clock::now();
    if (now < next_check) return;
    next_check = now + CLIENT_CHECK_INTERVAL;
    frames.poll();
    if (now < next_keep_alive) return;
    next_keep_alive = now + KEEP_ALIVE_INTERVAL;
    replies_.acknowledge();
    if (replies_.lost()) throw ConnectionLost("the client disconnected");
  };
  try {
    at::Tensor target = storages_.view(slot, view.meta, view.offset);
    replies_.before_write(slot.storage);
    try {
      fetcher_.fetch(origin, target, staging_tensor(target, view), bytes, keep_alive);
    } catch (const TransferFailed& failed) {
      throw TransferFailed(failed.code, "could not copy from " + origin.source + " at " + origin.host + ":" +
                                            std::to_string(origin.port) + ": " + failed.what() +
                                            "; the target tensor and all its views are invalid: create it "
                                            "again, or copy through the CPU");
    }
  } catch (const ConnectionLost&) {
    throw;
  } catch (...) {
    FailurePtr failure = current_failure(COPY_OP, ops_.count());
    graphs_.before_free(view.storage, slot);
    graphs_.on_storage_moved(view.storage);
    storages_.poison_slot(slot, failure);
    record_failure(failure);
  }
}

// --- replies ------------------------------------------------------------------------------------

void Session::get(Reader& in) {
  View view = read_view(in);
  Slot& slot = storages_.get(view.storage);
  run_with_reply([&] {
    const at::Tensor& source = storages_.view(slot, view.meta, view.offset);
    bool plain = source.is_contiguous() && view.meta.flags == 0;
    if (!plain) storages_.check_quota(view.meta.content_bytes);
    replies_.reply_tensor(plain ? source : source.resolve_conj().resolve_neg().contiguous(),
                          /*owned=*/!plain);
  });
}

void Session::synchronize() {
  run_with_reply([&] {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    replies_.reply(Writer());
  });
}

void Session::set_generator(Reader& in) {
  uint32_t generator = in.u32(), bytes = in.u32();
  const uint8_t* state = in.take(bytes);
  run_without_reply([&] { generators_.set_state(generator, state, bytes); }, "set_rng_state");
}

void Session::reply_generator_state(uint32_t generator) {
  run_with_reply([&] { replies_.reply_tensor(generators_.state(generator).contiguous(), /*owned=*/true); });
}

void Session::reply_stats(bool reset_peak) {
  run_with_reply([&] {
    SessionStats now = stats();
    if (reset_peak) storages_.reset_peak();
    Writer payload;
    payload.put(
        StatsReply{now.storages, now.bytes_allocated, now.bytes_allocated_peak, now.bytes_max, now.ops});
    replies_.reply(payload);
  });
}

void Session::reply_graph_report(uint32_t graph) {
  run_with_reply([&] {
    GraphReport report = graphs_.report(graph);
    Writer payload;
    payload.u8(static_cast<uint8_t>(report.kind));
    payload.u64(report.replays);
    payload.text(report.reason);
    replies_.reply(payload);
  });
}

}  // namespace genie
