// The session of one client: executes its records in order, over one or several connections.
// Authentication and waiting for a reconnect are in genie/executor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "../stream.h"
#include "../wire.h"
#include "failure.h"
#include "frame_reader.h"
#include "generator_table.h"
#include "graph_table.h"
#include "op_runner.h"
#include "parcel_fetcher.h"
#include "parcel_store.h"
#include "reply_writer.h"
#include "session_settings.h"
#include "staging.h"
#include "storage_table.h"
#include "templates.h"

namespace genie {

// How a connection ended.
enum class ConnectionOutcome {
  Closed,  // the client closed the session
  Lost,    // the connection broke; the client may reconnect
  Fatal,   // the session cannot continue; the error was sent if the connection still worked
};

struct SessionStats {
  uint64_t storages, bytes_allocated, bytes_allocated_peak, bytes_max, ops, frames_received, parcels,
      pending_fetches;
};

class Session {
 public:
  // `memory_quota_bytes` of 0 means no quota; `capture` and `compiler` may be null, `connector` empty.
  Session(const std::string& device, uint64_t memory_quota_bytes, std::vector<std::string> allowed_ops,
          int64_t spin_us, std::shared_ptr<GraphCapture> capture, std::shared_ptr<GraphCompiler> compiler,
          ParcelConnector connector);

  // Serves one connection until it ends. The client has the replies up to `replies_received`.
  ConnectionOutcome serve(std::shared_ptr<Stream> stream, uint64_t replies_received);
  // Thread-safe.
  uint64_t frames_received() const { return replies_.frames_received(); }
  // Thread-safe.
  SessionStats stats() const;
  // Thread-safe, but not on the serving thread: sends the parcel to another executor, once it is published.
  // Blocks until the fetch has ended; true if the other executor has acknowledged the parcel.
  bool send_parcel_until_acknowledged(uint64_t parcel_number, const std::shared_ptr<Stream>& stream) {
    return parcels_.send_parcel_until_acknowledged(parcel_number, stream);
  }
  // Frees everything. Not while serve() runs.
  void close();

 private:
  ConnectionOutcome serve_frames(Stream& stream, uint64_t replies_received);
  FrameHeader read_next_header(FrameReader& frames);
  // False after CloseSession.
  bool handle_frame_and_check_open(FrameReader& frames, const FrameHeader& header);
  void handle_upload_frame(FrameReader& frames, const FrameHeader& header);
  bool handle_records_and_check_open(const uint8_t* records, size_t bytes);
  // All records but Op, which is the most frequent one.
  void handle_record(RecordKind kind, uint32_t argument, WireReader& in);
  void handle_graph_record(RecordKind kind, uint32_t argument, WireReader& in);

  const std::shared_ptr<DecodedTemplate>& get_template(uint32_t template_number);
  void run_op(const std::shared_ptr<DecodedTemplate>& op_template, WireReader& in);
  void record_graph_step(const std::shared_ptr<DecodedTemplate>& op_template, WireReader& in);
  void check_recordable(RecordKind kind) const;
  void define_template(uint32_t template_number, WireReader& in);
  void drop_template(uint32_t template_number);
  void handle_allocate(WireReader& in);
  void handle_resize(WireReader& in);
  void handle_free(uint32_t storage);
  void handle_put(bool is_inline, WireReader& in);
  void begin_upload(const StorageView& view, uint64_t bytes);
  at::Tensor choose_staging_tensor(const at::Tensor& target, const StorageView& view);
  void publish_parcel(WireReader& in);
  void fetch_parcel(WireReader in, FrameReader& frames);
  void handle_get(WireReader& in);
  void handle_set_generator(WireReader& in);
  void handle_settings(WireReader& in);
  void run_dynamic_op(DecodedTemplate& op_template, WireReader& in);
  void reply_after_synchronizing();
  void reply_generator_state(uint32_t generator);
  void reply_stats(bool reset_peak);
  void reply_graph_report(uint32_t graph);

  void keep_first_failure(FailurePtr failure);
  // Runs `work`, which has no reply; a failure is reported with the next reply.
  template <class Work>
  void run_without_reply(Work work, const char* op = "");
  // Runs `work`, which sends a reply, unless a failure is pending; that, or its own failure, is the reply.
  template <class Work>
  void run_with_reply(Work work);

  c10::Device device_;
  StorageTable storages_;
  StagingBuffers staging_;
  ReplyWriter replies_;
  GeneratorTable generators_;
  OpRunner ops_;
  SessionSettings settings_;
  GraphTable graphs_;
  TemplateReader template_reader_;
  std::vector<std::shared_ptr<DecodedTemplate>> templates_;
  // Of the defined templates, and of dropped ones that graphs still use.
  std::shared_ptr<uint64_t> template_entries_ = std::make_shared<uint64_t>(0);
  Upload upload_;
  ParcelStore parcels_;
  ParcelFetcher parcel_fetcher_;
  FailurePtr pending_failure_;
  int64_t spin_us_;
  std::mutex serve_mutex_;
};

}  // namespace genie
