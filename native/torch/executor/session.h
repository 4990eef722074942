// One client's session: its records are read and carried out in order, over as many connections as it takes.
// Not for: who the client is, and waiting for it to come back (genie/agent/executor).
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
#include "copies.h"
#include "failure.h"
#include "generators.h"
#include "graphs.h"
#include "inbox.h"
#include "landing.h"
#include "ops.h"
#include "outbox.h"
#include "shelf.h"
#include "storages.h"
#include "templates.h"

namespace genie {

// How a connection, and with it perhaps the session, has ended.
enum class Outcome {
  Goodbye,  // the client has left for good
  Lost,     // the connection broke; the client may come back
  Fatal,    // the session cannot go on, and the client was told why, if it still listened
};

struct SessionStats {
  uint64_t storages, bytes_allocated, bytes_allocated_peak, bytes_max, ops, frames_received, shelved;
};

class Session {
 public:
  // `bytes_max` of 0 means no quota; `capture` and `compiler` may be null, `fetch` empty.
  Session(const std::string& device, uint64_t bytes_max, std::vector<std::string> allowed_ops,
          int64_t spin_us, std::shared_ptr<Capture> capture, std::shared_ptr<Compiler> compiler, Fetch fetch);

  // Serves over one connection until it ends. The client has the replies up to `replies_received`.
  Outcome serve(std::shared_ptr<Stream> stream, uint64_t replies_received);
  // From any thread.
  uint64_t frames_received() const { return outbox_.frames_received(); }
  SessionStats stats() const;
  // From any thread but the one that serves: gives another executor what was, or will be, shipped under the
  // number. Returns when that is over; true when the other has it.
  bool deliver(uint64_t number, const std::shared_ptr<Stream>& stream) {
    return shelf_.deliver(number, stream);
  }
  // Lets everything go. Not while it is served.
  void close();

 private:
  Outcome serve_frames(Stream& stream, uint64_t replies_received);
  FrameHeader next_header(Inbox& inbox);
  // False when that was the last one.
  bool take_frame(Inbox& inbox, const FrameHeader& header);
  void take_bytes(Inbox& inbox, const FrameHeader& header);
  bool take_records(const uint8_t* records, size_t bytes);
  // Everything but Op, which is most of it.
  void take_record(Record kind, uint32_t argument, Reader& in);
  void take_graph_record(Record kind, uint32_t argument, Reader& in);

  const std::shared_ptr<Template>& known_template(uint32_t number);
  void run_op(const std::shared_ptr<Template>& call, Reader& in);
  void write_down(const std::shared_ptr<Template>& call, Reader& in);
  void check_recordable(Record kind) const;
  void add_template(uint32_t number, Reader& in);
  void forget_template(uint32_t number);
  void allocate(Reader& in);
  void resize(Reader& in);
  void free(uint32_t storage);
  void put(bool inside, Reader& in);
  void begin_upload(const View& view, uint64_t bytes);
  at::Tensor staged_for(const at::Tensor& target, const View& view);
  void ship(Reader& in);
  void land(Reader in, Inbox& inbox);
  void get(Reader& in);
  void set_generator(Reader& in);
  void ask(Template& call, Reader& in);
  void synchronize();
  void reply_generator_state(uint32_t generator);
  void reply_stats(bool forget_peak);
  void reply_report(uint32_t graph);

  void note(FailurePtr failure);
  // Carries out what cannot be undone by a failure of its own; the failure is told with the next reply.
  template <class Work>
  void attempt(Work work);
  // Carries out what a reply is due for: that, or the first failure since the last one, or its own.
  template <class Work>
  void answer(Work work);

  c10::Device device_;
  StorageTable storages_;
  Copies copies_;
  Outbox outbox_;
  Generators generators_;
  OpRunner ops_;
  Graphs graphs_;
  TemplateReader reader_;
  std::vector<std::shared_ptr<Template>> templates_;
  // Of templates that are known or that graphs still hold.
  std::shared_ptr<uint64_t> template_nodes_ = std::make_shared<uint64_t>(0);
  Upload upload_;
  Shelf shelf_;
  Landing landing_;
  FailurePtr first_failure_;
  int64_t spin_us_;
  std::mutex serving_;
};

}  // namespace genie
