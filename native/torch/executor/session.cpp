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
constexpr const char* COPY_OP_NAME = "copy between devices";
constexpr const char* ALLOCATE_OP_NAME = "memory for a tensor";

bool starts_with_fetch_parcel(const uint8_t* records, size_t bytes) {
  return bytes >= sizeof(uint32_t) &&
         WireReader(records, bytes).read_u32() >> 24 == static_cast<uint32_t>(RecordKind::FetchParcel);
}

// State of the serving thread: the device, and no autograd, which runs on the client.
struct ServingThreadGuards {
  explicit ServingThreadGuards(c10::Device device) : device_guard(device) {}

  c10::DeviceGuard device_guard;
  c10::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

}  // namespace

Session::Session(const std::string& device, uint64_t memory_quota_bytes, std::vector<std::string> allowed_ops,
                 int64_t spin_us, std::shared_ptr<GraphCapture> capture,
                 std::shared_ptr<GraphCompiler> compiler, ParcelConnector connector)
    : device_(device),
      storages_(device_, memory_quota_bytes),
      staging_(device_),
      replies_(storages_, staging_, spin_us),
      generators_(device_),
      ops_(storages_, generators_, replies_),
      graphs_(storages_, ops_, replies_, settings_, std::move(capture), std::move(compiler)),
      template_reader_(device_, std::move(allowed_ops)),
      upload_(staging_),
      parcels_(device_, storages_),
      parcel_fetcher_(staging_, std::move(connector)),
      spin_us_(spin_us) {}

ConnectionOutcome Session::serve(std::shared_ptr<Stream> stream, uint64_t replies_received) {
  std::unique_lock<std::mutex> serve_lock(serve_mutex_, std::try_to_lock);
  if (!serve_lock) throw std::logic_error("the session is already being served");
  ServingThreadGuards thread(device_);
  settings_.apply_to_thread();
  ConnectionOutcome outcome;
  try {
    outcome = serve_frames(*stream, replies_received);
  } catch (const ConnectionLost&) {
    outcome = ConnectionOutcome::Lost;
  } catch (...) {
    replies_.send_fatal_error(fatal_failure_from_current_exception());
    outcome = ConnectionOutcome::Fatal;
  }
  replies_.end_connection();
  return outcome;
}

SessionStats Session::stats() const {
  const MemoryCounters& memory = storages_.counters();
  return {
      memory.storages, storages_.bytes_in_use(), memory.counted_bytes_peak, storages_.bytes_max(),
      ops_.op_count(), frames_received(),        parcels_.parcel_count(),   parcels_.pending_fetch_count()};
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

ConnectionOutcome Session::serve_frames(Stream& stream, uint64_t replies_received) {
  FrameReader frames(stream, spin_us_);
  replies_.begin_connection(stream, replies_received);
  while (!replies_.is_connection_lost()) {
    if (!handle_frame_and_check_open(frames, read_next_header(frames))) {
      replies_.acknowledge_frames();
      return ConnectionOutcome::Closed;
    }
    replies_.acknowledge_frames_if_due();
  }
  return ConnectionOutcome::Lost;
}

FrameHeader Session::read_next_header(FrameReader& frames) {
  if (replies_.has_unacknowledged_frames() && !frames.wait_for_frame(ACKNOWLEDGE_IDLE_US))
    replies_.acknowledge_frames();
  frames.wait_for_frame(NO_TIMEOUT);
  return frames.read_header();
}

bool Session::handle_frame_and_check_open(FrameReader& frames, const FrameHeader& header) {
  uint64_t expected = replies_.frames_received() + 1;
  if (header.number > expected) {
    throw ProtocolError("frame " + std::to_string(header.number) + " received, expected " +
                        std::to_string(expected));
  }
  replies_.release_replies(header.replies_received);
  if (header.number < expected) {  // received before the connection broke
    frames.skip_payload(header.bytes);
    return true;
  }
  if (header.kind == FrameKind::Bytes) {
    handle_upload_frame(frames, header);
    return true;
  }
  if (header.kind != FrameKind::Records) throw ProtocolError("a frame has an unknown kind");
  if (upload_.in_progress()) throw ProtocolError("records received in the middle of an upload");
  const uint8_t* records = frames.read_payload(header.bytes);
  if (starts_with_fetch_parcel(records, header.bytes)) {
    fetch_parcel(WireReader(records + sizeof(uint32_t), header.bytes - sizeof(uint32_t)), frames);
    replies_.count_received_frame(header.number, header.bytes);
    replies_.acknowledge_frames();  // the client limits how much is unacknowledged
    return true;
  }
  replies_.count_received_frame(header.number, header.bytes);
  return handle_records_and_check_open(records, header.bytes);
}

void Session::handle_upload_frame(FrameReader& frames, const FrameHeader& header) {
  frames.read_payload_into(upload_.next_destination(header.bytes), header.bytes);
  replies_.count_received_frame(header.number, header.bytes);
  run_without_reply([&] { upload_.finish_write(header.bytes); });
  if (!upload_.in_progress())
    replies_.acknowledge_frames();  // the client may be waiting to release its memory
}

bool Session::handle_records_and_check_open(const uint8_t* records, size_t bytes) {
  WireReader in(records, bytes);
  while (in.remaining() > 0) {
    uint32_t head = in.read_u32();
    auto kind = static_cast<RecordKind>(head >> 24);
    uint32_t argument = head & RECORD_ARGUMENT_MAX;
    if (kind == RecordKind::Op) {
      run_op(get_template(argument), in);
      continue;
    }
    bool last = kind == RecordKind::CloseSession;
    if (!last) handle_record(kind, argument, in);
    bool more = in.remaining() > 0;
    if (more && (last || upload_.in_progress()))
      throw ProtocolError("a record follows the last one of its frame");
    if (last) return false;
  }
  return true;
}

// Only Op and records that do not affect a recorded graph are allowed between GraphBegin and GraphEnd.
void Session::check_recordable(RecordKind kind) const {
  bool fits = kind == RecordKind::Allocate || kind == RecordKind::Free ||
              kind == RecordKind::DefineTemplate || kind == RecordKind::DropTemplate ||
              kind == RecordKind::DynamicOp || kind == RecordKind::BindOutputs ||
              kind == RecordKind::GraphStep || kind == RecordKind::GraphEnd ||
              kind == RecordKind::DropParcel || kind == RecordKind::Settings;
  if (graphs_.is_recording() && !fits)
    throw ProtocolError("a record is not allowed while a graph is being recorded");
}

void Session::handle_record(RecordKind kind, uint32_t argument, WireReader& in) {
  check_recordable(kind);
  switch (kind) {
    case RecordKind::DynamicOp:
      return run_dynamic_op(*get_template(argument), in);
    case RecordKind::BindOutputs: {
      uint64_t number = in.read_u64();
      return ops_.bind_outputs(number, argument, in);
    }
    case RecordKind::DefineTemplate:
      return define_template(argument, in);
    case RecordKind::DropTemplate:
      return drop_template(argument);
    case RecordKind::Allocate:
      return handle_allocate(in);
    case RecordKind::Free:
      return handle_free(in.read_u32());
    case RecordKind::Resize:
      return handle_resize(in);
    case RecordKind::Put:
      return handle_put(argument == 1, in);
    case RecordKind::Get:
      return handle_get(in);
    case RecordKind::Sync:
      return reply_after_synchronizing();
    case RecordKind::Seed: {
      uint32_t generator = in.read_u32();
      return generators_.seed(generator, in.read_u64());
    }
    case RecordKind::GeneratorState:
      return reply_generator_state(in.read_u32());
    case RecordKind::SetGenerator:
      return handle_set_generator(in);
    case RecordKind::FreeGenerator:
      return generators_.free_generator(in.read_u32());
    case RecordKind::Stats:
      return reply_stats(/*reset_peak=*/argument == 1);
    case RecordKind::Settings:
      return handle_settings(in);
    case RecordKind::PublishParcel:
      return publish_parcel(in);
    case RecordKind::DropParcel:
      return parcels_.drop_parcel(in.read_u64());
    case RecordKind::FetchParcel:
      throw ProtocolError("a FetchParcel is not alone in its frame");
    default:
      return handle_graph_record(kind, argument, in);
  }
}

void Session::handle_graph_record(RecordKind kind, uint32_t argument, WireReader& in) {
  switch (kind) {
    case RecordKind::GraphBegin:
      return graphs_.begin_recording(in.read_u32());
    case RecordKind::GraphEnd:
      return graphs_.end_recording(argument);
    case RecordKind::GraphStep:
      return record_graph_step(get_template(argument), in);
    case RecordKind::GraphReplay:
      return keep_first_failure(graphs_.replay(in.read_u32()));
    case RecordKind::GraphResult: {
      uint32_t result = in.read_u32();
      return keep_first_failure(graphs_.share_result(result, in.read_u32()));
    }
    case RecordKind::GraphFree:
      return graphs_.free_graph(in.read_u32());
    case RecordKind::GraphReport:
      return reply_graph_report(in.read_u32());
    default:
      throw ProtocolError("a record has an unknown kind");
  }
}

// --- failures -----------------------------------------------------------------------------------

void Session::keep_first_failure(FailurePtr failure) {
  if (failure && !pending_failure_) pending_failure_ = std::move(failure);
}

template <class Work>
void Session::run_without_reply(Work work, const char* op) {
  try {
    work();
  } catch (const PoisonedTensor&) {
    // The original failure has been recorded.
  } catch (...) {
    keep_first_failure(failure_from_current_exception(op, ops_.op_count()));
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
      failure = failure_from_current_exception("", ops_.op_count());
    }
  }
  replies_.send_error_reply(*failure);
}

// --- templates and ops --------------------------------------------------------------------------

void Session::run_op(const std::shared_ptr<DecodedTemplate>& op_template, WireReader& in) {
  WireReader start = in;
  keep_first_failure(ops_.run(*op_template, in));
  if (!graphs_.is_recording()) return;
  size_t bytes = start.remaining() - in.remaining();
  graphs_.record_op(op_template, start.consume(bytes), bytes);
}

void Session::record_graph_step(const std::shared_ptr<DecodedTemplate>& op_template, WireReader& in) {
  if (!graphs_.is_recording() || !op_template->has_predicted_outputs)
    throw ProtocolError("a GraphStep is not inside a graph");
  size_t bytes = op_template->call_data_bytes + sizeof(uint32_t) * op_template->new_output_count;
  graphs_.record_op(op_template, in.consume(bytes), bytes);
}

const std::shared_ptr<DecodedTemplate>& Session::get_template(uint32_t template_number) {
  if (template_number >= templates_.size() || !templates_[template_number]) {
    throw ProtocolError("template " + std::to_string(template_number) + " does not exist");
  }
  return templates_[template_number];
}

void Session::define_template(uint32_t template_number, WireReader& in) {
  if (template_number >= TEMPLATES_MAX) {
    throw ProtocolError("template " + std::to_string(template_number) + " is out of range");
  }
  if (template_number >= templates_.size()) templates_.resize(template_number + 1);
  if (templates_[template_number])
    throw ProtocolError("template " + std::to_string(template_number) + " is already defined");
  uint32_t bytes = in.read_u32();
  WireReader body(in.consume(bytes), bytes);
  auto parsed = template_reader_.read(body);
  *template_entries_ += parsed->entry_count;
  templates_[template_number] = std::shared_ptr<DecodedTemplate>(
      parsed.release(), [nodes = template_entries_](DecodedTemplate* dropped) {
        *nodes -= dropped->entry_count;
        delete dropped;
      });
  if (*template_entries_ > TEMPLATE_ENTRIES_MAX) throw ProtocolError("the templates exceed the maximum size");
}

void Session::drop_template(uint32_t template_number) {
  get_template(template_number);
  templates_[template_number].reset();
}

void Session::run_dynamic_op(DecodedTemplate& op_template, WireReader& in) {
  if (pending_failure_) {
    ops_.skip_dynamic_op(op_template, in);
    return run_with_reply([] {});
  }
  WireWriter reply;
  FailurePtr failure = ops_.run_dynamic(op_template, in, replies_.next_reply_number(), reply);
  if (failure) {
    replies_.send_error_reply(*failure);
  } else {
    replies_.send_reply(reply);
  }
}

// --- memory -------------------------------------------------------------------------------------

void Session::handle_allocate(WireReader& in) {
  uint32_t storage = in.read_u32();
  uint64_t bytes = in.read_u64();
  storages_.check_number_unused(storage);
  if (bytes > INT64_MAX) throw ProtocolError("the size of a storage overflows");
  if (graphs_.is_recording()) graphs_.record_allocate(storage, bytes);
  try {
    storages_.allocate(storage, bytes);
  } catch (...) {
    FailurePtr failure = failure_from_current_exception(ALLOCATE_OP_NAME, ops_.op_count());
    storages_.add_poisoned_storage(storage, failure);
    keep_first_failure(failure);
  }
}

void Session::handle_resize(WireReader& in) {
  uint32_t storage = in.read_u32();
  StorageSlot& slot = storages_.existing_slot(storage);
  uint64_t bytes = in.read_u64();
  if (bytes > INT64_MAX) throw ProtocolError("the size of a storage overflows");
  if (slot.failure) return;
  graphs_.before_storage_freed(storage, slot);
  graphs_.on_storage_moved(storage);
  try {
    storages_.resize(slot, bytes);
  } catch (...) {
    // The client assumes the new size, so the storage cannot be used any more.
    FailurePtr failure = failure_from_current_exception(ALLOCATE_OP_NAME, ops_.op_count());
    storages_.free_and_poison(slot, failure);
    keep_first_failure(failure);
  }
}

void Session::handle_free(uint32_t storage) {
  StorageSlot& slot = storages_.existing_slot(storage);
  graphs_.before_storage_freed(storage, slot);
  storages_.free(storage);
  if (graphs_.is_recording()) {
    graphs_.record_free(storage);
  } else {
    graphs_.on_storage_freed(storage);
  }
}

// --- uploads ------------------------------------------------------------------------------------

void Session::handle_put(bool is_inline, WireReader& in) {
  StorageView view = read_storage_view(in);
  uint64_t bytes = in.read_u64();
  if (bytes != view.meta.content_bytes) throw ProtocolError("the size of an upload differs from its tensor");
  if (is_inline && bytes > INLINE_UPLOAD_BYTES_MAX)
    throw ProtocolError("an upload is too large for a record");
  const uint8_t* data = is_inline ? in.consume(bytes) : nullptr;
  storages_.existing_slot(view.storage);
  upload_.begin({}, {}, bytes);  // discarded, unless begin_upload() succeeds
  run_without_reply([&] { begin_upload(view, bytes); });
  if (is_inline || bytes == 0) run_without_reply([&] { upload_.write_all_bytes(data); });
}

void Session::begin_upload(const StorageView& view, uint64_t bytes) {
  StorageSlot& slot = storages_.existing_slot(view.storage);
  at::Tensor target = storages_.get_view(slot, view.meta, view.offset);
  replies_.before_storage_written(slot.storage);
  upload_.begin(target, choose_staging_tensor(target, view), bytes);
}

at::Tensor Session::choose_staging_tensor(const at::Tensor& target, const StorageView& view) {
  if (target.is_contiguous() && view.meta.flags == 0) return target;
  storages_.check_quota(view.meta.content_bytes);  // an expanded tensor is larger than its storage
  return at::empty(target.sizes(), target.options());
}

// --- copies between executors -------------------------------------------------------------------

void Session::publish_parcel(WireReader& in) {
  uint64_t number = in.read_u64();
  StorageView view = read_storage_view(in);
  parcels_.check_parcel_number_increases(number);
  StorageSlot& slot = storages_.existing_slot(view.storage);
  try {
    parcels_.check_capacity();
    const at::Tensor& source = storages_.get_view(slot, view.meta, view.offset);
    storages_.check_quota(view.meta.content_bytes);
    // A copy: the client may write to the source before the other executor has fetched it.
    at::Tensor copy = at::empty(source.sizes(), source.options());
    copy.copy_(source);
    parcels_.store(number, std::move(copy));
  } catch (const PoisonedTensor& poisoned) {
    parcels_.store(number, poisoned.failure);
  } catch (...) {
    FailurePtr failure = failure_from_current_exception(COPY_OP_NAME, ops_.op_count());
    parcels_.store(number, failure);
    keep_first_failure(failure);
  }
}

// If the client's connection breaks, the fetch is cancelled and starts again when the client resends the
// frame.
void Session::fetch_parcel(WireReader in, FrameReader& frames) {
  check_recordable(RecordKind::FetchParcel);
  StorageView view = read_storage_view(in);
  uint64_t bytes = in.read_u64();
  ParcelOrigin origin = read_parcel_origin(in);
  if (in.remaining() > 0) throw ProtocolError("a FetchParcel is not alone in its frame");
  if (bytes != view.meta.content_bytes) throw ProtocolError("the size of a copy differs from its tensor");
  StorageSlot& slot = storages_.existing_slot(view.storage);
  if (slot.failure) return;  // already reported
  auto now = std::chrono::steady_clock::now();
  auto keep_alive = [&, next_check = now + CLIENT_CHECK_INTERVAL,
                     next_keep_alive = now + KEEP_ALIVE_INTERVAL]() mutable {
    auto now = std::chrono::steady_clock::now();
    if (now < next_check) return;
    next_check = now + CLIENT_CHECK_INTERVAL;
    frames.receive_available();
    if (now < next_keep_alive) return;
    next_keep_alive = now + KEEP_ALIVE_INTERVAL;
    replies_.acknowledge_frames();
    if (replies_.is_connection_lost()) throw ConnectionLost("the client disconnected");
  };
  try {
    at::Tensor target = storages_.get_view(slot, view.meta, view.offset);
    replies_.before_storage_written(slot.storage);
    try {
      parcel_fetcher_.fetch(origin, target, choose_staging_tensor(target, view), bytes, keep_alive);
    } catch (const TransferFailed& failed) {
      throw TransferFailed(failed.code, "could not copy from " + origin.source + " at " + origin.host + ":" +
                                            std::to_string(origin.port) + ": " + failed.what() +
                                            "; the target tensor and all its views are invalid: create it "
                                            "again, or copy through the CPU");
    }
  } catch (const ConnectionLost&) {
    throw;
  } catch (...) {
    FailurePtr failure = failure_from_current_exception(COPY_OP_NAME, ops_.op_count());
    graphs_.before_storage_freed(view.storage, slot);
    graphs_.on_storage_moved(view.storage);
    storages_.free_and_poison(slot, failure);
    keep_first_failure(failure);
  }
}

// --- replies ------------------------------------------------------------------------------------

void Session::handle_get(WireReader& in) {
  StorageView view = read_storage_view(in);
  StorageSlot& slot = storages_.existing_slot(view.storage);
  run_with_reply([&] {
    const at::Tensor& source = storages_.get_view(slot, view.meta, view.offset);
    bool plain = source.is_contiguous() && view.meta.flags == 0;
    if (!plain) storages_.check_quota(view.meta.content_bytes);
    replies_.send_tensor_reply(plain ? source : source.resolve_conj().resolve_neg().contiguous(),
                               /*owned=*/!plain);
  });
}

void Session::reply_after_synchronizing() {
  run_with_reply([&] {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    replies_.send_reply(WireWriter());
  });
}

void Session::handle_set_generator(WireReader& in) {
  uint32_t generator = in.read_u32(), bytes = in.read_u32();
  const uint8_t* state = in.consume(bytes);
  run_without_reply([&] { generators_.set_state(generator, state, bytes); }, "set_rng_state");
}

void Session::handle_settings(WireReader& in) {
  Settings settings = read_settings(in);
  if (graphs_.is_recording()) graphs_.record_settings(settings);
  run_without_reply([&] { settings_.set(settings); }, "settings");
}

void Session::reply_generator_state(uint32_t generator) {
  run_with_reply(
      [&] { replies_.send_tensor_reply(generators_.get_state(generator).contiguous(), /*owned=*/true); });
}

void Session::reply_stats(bool reset_peak) {
  run_with_reply([&] {
    SessionStats now = stats();
    if (reset_peak) storages_.reset_peak();
    WireWriter payload;
    payload.append_value(
        StatsReply{now.storages, now.bytes_allocated, now.bytes_allocated_peak, now.bytes_max, now.ops});
    replies_.send_reply(payload);
  });
}

void Session::reply_graph_report(uint32_t graph) {
  run_with_reply([&] {
    GraphReport report = graphs_.report(graph);
    WireWriter payload;
    payload.write_u8(static_cast<uint8_t>(report.kind));
    payload.write_u64(report.replays);
    payload.write_text(report.reason);
    replies_.send_reply(payload);
  });
}

}  // namespace genie
