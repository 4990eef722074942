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
#include "generators.h"
#include "graphs.h"
#include "ops.h"
#include "parcel_fetcher.h"
#include "parcel_store.h"
#include "reply_writer.h"
#include "staging.h"
#include "storages.h"
#include "templates.h"

namespace genie {

// How a connection ended.
enum class Outcome {
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
  // `bytes_max` of 0 means no quota; `capture` and `compiler` may be null, `connector` empty.
  Session(const std::string& device, uint64_t bytes_max, std::vector<std::string> allowed_ops,
          int64_t spin_us, std::shared_ptr<Capture> capture, std::shared_ptr<Compiler> compiler,
          ParcelConnector connector);

  // Serves one connection until it ends. The client has the replies up to `replies_received`.
  Outcome serve(std::shared_ptr<Stream> stream, uint64_t replies_received);
  // Thread-safe.
  uint64_t frames_received() const { return replies_.frames_received(); }
  // Thread-safe.
  SessionStats stats() const;
  // Thread-safe, but not on the serving thread: sends the parcel to another executor, once it is published.
  // Blocks until the fetch has ended; true if the other executor has acknowledged the parcel.
  bool send_parcel(uint64_t number, const std::shared_ptr<Stream>& stream) {
    return parcels_.send_parcel(number, stream);
  }
  // Frees everything. Not while serve() runs.
  void close();

 private:
  Outcome serve_frames(Stream& stream, uint64_t replies_received);
  FrameHeader next_header(FrameReader& frames);
  // False after CloseSession.
  bool handle_frame(FrameReader& frames, const FrameHeader& header);
  void handle_bytes(FrameReader& frames, const FrameHeader& header);
  bool handle_records(const uint8_t* records, size_t bytes);
  // All records but Op, which is the most frequent one.
  void handle_record(Record kind, uint32_t argument, Reader& in);
  void handle_graph_record(Record kind, uint32_t argument, Reader& in);

  const std::shared_ptr<Template>& get_template(uint32_t number);
  void run_op(const std::shared_ptr<Template>& call, Reader& in);
  void record_graph_step(const std::shared_ptr<Template>& call, Reader& in);
  void check_recordable(Record kind) const;
  void define_template(uint32_t number, Reader& in);
  void drop_template(uint32_t number);
  void allocate(Reader& in);
  void resize(Reader& in);
  void free(uint32_t storage);
  void put(bool is_inline, Reader& in);
  void begin_upload(const View& view, uint64_t bytes);
  at::Tensor staging_tensor(const at::Tensor& target, const View& view);
  void publish_parcel(Reader& in);
  void fetch_parcel(Reader in, FrameReader& frames);
  void get(Reader& in);
  void set_generator(Reader& in);
  void run_dynamic_op(Template& call, Reader& in);
  void synchronize();
  void reply_generator_state(uint32_t generator);
  void reply_stats(bool reset_peak);
  void reply_graph_report(uint32_t graph);

  void record_failure(FailurePtr failure);
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
  Generators generators_;
  OpRunner ops_;
  Graphs graphs_;
  TemplateReader reader_;
  std::vector<std::shared_ptr<Template>> templates_;
  // Of the defined templates, and of dropped ones that graphs still use.
  std::shared_ptr<uint64_t> template_nodes_ = std::make_shared<uint64_t>(0);
  Upload upload_;
  ParcelStore parcels_;
  ParcelFetcher fetcher_;
  FailurePtr pending_failure_;
  int64_t spin_us_;
  std::mutex serve_mutex_;
};

}  // namespace genie
