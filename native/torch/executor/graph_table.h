// Graphs: recorded records that a client replays by number. A graph is replayed step by step, as one compiled
// function if the client requests it, or as a CUDA graph where the accelerator supports it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../wire.h"
#include "failure.h"
#include "op_runner.h"
#include "reply_writer.h"
#include "session_settings.h"
#include "storage_table.h"
#include "templates.h"
#include "tensor_meta.h"

namespace genie {

// A graph of the accelerator, and the size of its memory pool.
struct CapturedGraph {
  std::shared_ptr<void> graph;
  uint64_t pool_bytes = 0;
};

// Captures work on the accelerator instead of running it, as CUDA graphs do. One capture at a time.
class GraphCapture {
 public:
  virtual ~GraphCapture() = default;
  virtual void begin() = 0;
  virtual CapturedGraph end() = 0;
  // Ends the capture after an error. False if the accelerator has failed.
  virtual bool try_abort() noexcept = 0;
  virtual void replay(void* captured_graph) = 0;
};

struct GraphStep {
  RecordKind kind;  // Op, Allocate, Free or Settings
  std::shared_ptr<DecodedTemplate> op_template;
  std::vector<uint8_t> record;  // what follows the head of an Op or Settings
  uint32_t storage = 0;
  uint64_t allocated_bytes = 0;
};

// A compiled function from tensors to tensors; it may write to its inputs.
struct CompiledGraph {
  std::shared_ptr<void> function;
  std::vector<StorageView> inputs, results;
  uint64_t result_bytes = 0;
};

class GraphCompiler {
 public:
  virtual ~GraphCompiler() = default;
  // `result_storages`: storages created by the steps that the function must return. `storage_bytes`: sizes of
  // the storages that exist before. Throws if the steps cannot be compiled; they are then replayed one by
  // one. `keep_alive` is called periodically.
  virtual CompiledGraph compile(const std::vector<GraphStep>& steps,
                                const std::vector<uint32_t>& result_storages,
                                const std::unordered_map<uint32_t, uint64_t>& storage_bytes,
                                const std::function<void()>& keep_alive) = 0;
  virtual std::vector<at::Tensor> run(void* compiled_function, const std::vector<at::Tensor>& inputs) = 0;
};

// `reason`: why no faster kind is used.
struct GraphReport {
  ReplayKind kind = ReplayKind::Steps;
  uint64_t replays = 0;
  std::string reason;
};

class GraphTable {
 public:
  // `capture` and `compiler` may be null: then every replay runs step by step.
  GraphTable(StorageTable& storages, OpRunner& ops, ReplyWriter& replies, SessionSettings& settings,
             std::shared_ptr<GraphCapture> capture, std::shared_ptr<GraphCompiler> compiler)
      : storages_(storages),
        ops_(ops),
        replies_(replies),
        settings_(settings),
        capture_(std::move(capture)),
        compiler_(std::move(compiler)) {}

  bool is_recording() const { return recording_graph_ != nullptr; }
  void begin_recording(uint32_t graph_number);
  // `end_action`: an argument of GraphEnd.
  void end_recording(uint32_t end_action);
  // While recording, after the record was executed.
  void record_op(const std::shared_ptr<DecodedTemplate>& op_template, const uint8_t* record, size_t bytes);
  void record_allocate(uint32_t storage, uint64_t bytes);
  void record_free(uint32_t storage);
  void record_settings(const Settings& settings);

  // Call before the client frees or resizes a storage: unreceived replies keep its contents.
  void before_storage_freed(uint32_t storage_number, const StorageSlot& slot);
  // Call after the client freed a storage while not recording; a graph that returns it stops keeping it.
  void on_storage_freed(uint32_t storage_number);
  // Call when a storage gets other memory: captures that use the old memory are released.
  void on_storage_moved(uint32_t storage_number);

  // Storage `new_storage` gets the current contents of `result_storage`, a result of a graph. They share
  // memory until a captured replay is about to overwrite the result; if `new_storage` was freed by then,
  // nothing is copied.
  FailurePtr share_result(uint32_t result_storage, uint32_t new_storage);

  // Returns the first failure, or null.
  FailurePtr replay(uint32_t graph_number);
  GraphReport report(uint32_t graph_number);
  void free_graph(uint32_t graph_number);
  void clear();

 private:
  // A storage at the time of the capture. Kept alive, so that its address is not reused.
  struct CapturedStorage {
    StorageSlot* slot;
    c10::Storage storage;
    const void* memory;
    uint64_t bytes;
    bool is_result;  // the client may have freed it
  };
  struct RecordedGraph {
    std::optional<Settings> settings;  // at its first op
    bool has_ops = false;
    std::vector<GraphStep> steps;
    uint64_t steps_bytes = 0;                                // memory of the steps
    std::unordered_set<uint32_t> input_storages;             // storages that it uses and does not create
    std::vector<std::pair<uint32_t, uint64_t>> input_bytes;  // their sizes when it was recorded
    std::unordered_set<uint32_t> written_inputs;             // inputs that it writes to
    std::unordered_set<uint32_t> created_storages;
    std::unordered_set<uint32_t> results;                   // created and not freed by the steps
    std::unordered_set<uint32_t> freed_results;             // results that the client has freed
    std::unordered_set<uint32_t> storages_sharing_results;  // storages that share the memory of a result
    std::unordered_set<uint32_t> shared_results;            // results shared since the last replay
    uint64_t replay_count = 0;
    bool compile_pending = false;
    std::optional<CompiledGraph> compiled;
    std::string why_not_compiled, why_not_captured;
    bool has_run = false;  // its kernels have run, which a capture requires
    CapturedGraph captured;
    std::vector<CapturedStorage> captured_storages;
    uint64_t storage_changes_seen = 0;
    int capture_count = 0;
  };

  RecordedGraph& get_graph(uint32_t graph_number);
  void add_step(GraphStep step);
  void add_created_storage(uint32_t storage);
  void add_input_storages(const std::vector<TemplateArgument>& arguments, const uint8_t* call_data);
  void release_capture(RecordedGraph& graph);

  bool has_valid_inputs(const RecordedGraph& graph);
  bool reads_host_memory(const RecordedGraph& graph);
  void copy_replies_before_graph_writes(const RecordedGraph& graph);
  bool is_capture_valid(RecordedGraph& graph);
  void try_compile(RecordedGraph& graph);
  void apply_recorded_settings(const RecordedGraph& graph);
  FailurePtr run_uncaptured(RecordedGraph& graph);
  FailurePtr run_steps(RecordedGraph& graph);
  FailurePtr run_step(RecordedGraph& graph, GraphStep& step);
  FailurePtr run_compiled(RecordedGraph& graph);
  void store_results(RecordedGraph& graph, const std::vector<at::Tensor>& inputs,
                     std::vector<at::Tensor> results);
  at::Tensor copy_result_if_shared(const at::Tensor& result, const TensorMeta& expected,
                                   std::unordered_set<const c10::StorageImpl*>& used_storages) const;
  void free_previous_result(const RecordedGraph& graph, uint32_t storage);
  void free_results_freed_by_client(const RecordedGraph& graph);
  bool can_capture(RecordedGraph& graph);
  void try_capture(RecordedGraph& graph);
  FailurePtr run_and_capture(CapturedGraph& captured, RecordedGraph& graph);
  void free_created_storages(const RecordedGraph& graph);
  void add_captured_storages(RecordedGraph& graph, const std::unordered_set<uint32_t>& storage_numbers,
                             bool are_results);
  FailurePtr unshare_results(RecordedGraph& graph);

  StorageTable& storages_;
  OpRunner& ops_;
  ReplyWriter& replies_;
  SessionSettings& settings_;
  std::shared_ptr<GraphCapture> capture_;
  std::shared_ptr<GraphCompiler> compiler_;
  std::unordered_map<uint32_t, std::unique_ptr<RecordedGraph>> graphs_;
  std::unordered_map<uint32_t, RecordedGraph*> graph_of_result_;  // by result
  std::unique_ptr<RecordedGraph> recording_graph_;
  uint32_t recording_graph_number_ = 0;
  uint64_t all_steps_bytes_ = 0;  // of all steps
};

}  // namespace genie
