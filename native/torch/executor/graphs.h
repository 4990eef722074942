// Records that were written down, to be carried out again by one word of the client. Where the client asks
// for it they are compiled into one function. On an accelerator that can, a replay becomes a graph of its own
// (CUDA graphs), and from then on the accelerator replays it alone. Not for: carrying a single record out
// (ops.h).
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
#include "look.h"
#include "ops.h"
#include "outbox.h"
#include "storages.h"
#include "templates.h"

namespace genie {

// Work that the accelerator has taken down, and the memory that it keeps for it.
struct TakenDown {
  std::shared_ptr<void> work;
  uint64_t bytes = 0;
};

// How the accelerator takes down work instead of doing it. One at a time.
class Capture {
 public:
  virtual ~Capture() = default;
  virtual void begin() = 0;
  // What was taken down; its work is to be given to replay().
  virtual TakenDown end() = 0;
  // Ends without a result, after something went wrong. False when the accelerator does not work any more.
  virtual bool abandon() noexcept = 0;
  virtual void replay(void* work) = 0;
};

struct GraphStep {
  Record kind;  // Op, Allocate or Free
  std::shared_ptr<Template> call;
  std::vector<uint8_t> record;  // what follows the head of an Op
  uint32_t storage = 0;
  uint64_t bytes = 0;
};

// One function of some tensors that gives others; it may write to what it is given.
struct Compiled {
  std::shared_ptr<void> function;
  std::vector<View> inputs, results;
  uint64_t result_bytes = 0;
};

// Makes such a function of a graph's steps.
class Compiler {
 public:
  virtual ~Compiler() = default;
  // `wanted`: storages made by the steps that have to be among the results. `sizes`: the bytes of those that
  // are there before. An exception says why it cannot be done; the steps are then carried out as they are.
  // `meanwhile` is called now and then.
  virtual Compiled compile(const std::vector<GraphStep>& steps, const std::vector<uint32_t>& wanted,
                           const std::unordered_map<uint32_t, uint64_t>& sizes,
                           const std::function<void()>& meanwhile) = 0;
  virtual std::vector<at::Tensor> run(void* function, const std::vector<at::Tensor>& inputs) = 0;
};

// How a graph is replayed, how often it was, and why not in a better way.
struct GraphReport {
  ReplayKind how = ReplayKind::Steps;
  uint64_t replays = 0;
  std::string why;
};

class Graphs {
 public:
  // `capture` and `compiler` may be null: then every replay is carried out step by step.
  Graphs(StorageTable& storages, OpRunner& ops, Outbox& outbox, std::shared_ptr<Capture> capture,
         std::shared_ptr<Compiler> compiler)
      : storages_(storages),
        ops_(ops),
        outbox_(outbox),
        capture_(std::move(capture)),
        compiler_(std::move(compiler)) {}

  bool recording() const { return recording_ != nullptr; }
  void begin(uint32_t number);
  // `how`: an argument of GraphEnd.
  void end(uint32_t how);
  // While recording, after each has been carried out.
  void op(const std::shared_ptr<Template>& call, const uint8_t* record, size_t bytes);
  void allocated(uint32_t storage, uint64_t bytes);
  void freed(uint32_t storage);

  // Before the client frees or resizes a storage: replies that still need its memory keep what they show.
  void before_free(uint32_t number, const Slot& slot);
  // The client has let go of a storage outside of a recording; a graph whose result it is does not keep it.
  void let_go(uint32_t number);
  // A storage has other memory now: what the accelerator has taken down with the old one is given up.
  void moved(uint32_t number);

  // The storage `number` is to have what `result`, a graph's result, has now. A replay that takes place on
  // the accelerator writes over the result, and copies it first if `number` is still there; so most are never
  // copied.
  FailurePtr take_result(uint32_t result, uint32_t number);

  // The first failure, when there was one.
  FailurePtr replay(uint32_t number);
  GraphReport report(uint32_t number);
  void free(uint32_t number);
  void clear();

 private:
  // A storage as it was when the accelerator took work on it down. Held, so that no other takes its place.
  struct Held {
    Slot* slot;
    c10::Storage storage;
    const void* memory;
    uint64_t bytes;
    bool own;  // a result: the client may have let it go
  };
  struct Graph {
    std::vector<GraphStep> steps;
    uint64_t bytes = 0;                                        // that the steps take
    std::unordered_set<uint32_t> outside;                      // storages that it uses and does not make
    std::vector<std::pair<uint32_t, uint64_t>> outside_bytes;  // of those, what they had when it was recorded
    std::unordered_set<uint32_t> written;                      // of those, what it writes to
    std::unordered_set<uint32_t> made;
    std::unordered_set<uint32_t> alive;     // of those it makes, what it does not free
    std::unordered_set<uint32_t> unwanted;  // of the alive ones, what the client has freed since
    std::unordered_set<uint32_t> sharing;   // storages that were given the memory of a result
    std::unordered_set<uint32_t> given;     // results whose memory one has been given since the last replay
    uint64_t replays = 0;
    bool to_be_compiled = false;
    std::optional<Compiled> compiled;
    std::string why_not_compiled, why_not_captured;
    bool warm = false;  // its kernels have been run, so that they can be taken down
    TakenDown taken_down;
    std::vector<Held> held;
    uint64_t changes_seen = 0;
    int captures = 0;
  };

  Graph& known(uint32_t number);
  void add(GraphStep step);
  void note_made(uint32_t storage);
  void note_given(const std::vector<Argument>& arguments, const uint8_t* data);
  void give_up(Graph& graph);

  bool is_sound(const Graph& graph);
  bool reads_host_memory(const Graph& graph);
  void keep_replies(const Graph& graph);
  bool is_current(Graph& graph);
  void compile(Graph& graph);
  FailurePtr run(Graph& graph);
  FailurePtr run_steps(Graph& graph);
  FailurePtr run_step(Graph& graph, GraphStep& step);
  FailurePtr run_compiled(Graph& graph);
  void keep_results(Graph& graph, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results);
  at::Tensor own_result(const at::Tensor& found, const Look& look,
                        std::unordered_set<const c10::StorageImpl*>& taken) const;
  void make_room(const Graph& graph, uint32_t storage);
  void free_unwanted(const Graph& graph);
  bool may_be_taken_down(Graph& graph);
  void take_down(Graph& graph);
  FailurePtr run_into(TakenDown& taken, Graph& graph);
  void forget_made(const Graph& graph);
  void hold(Graph& graph, const std::unordered_set<uint32_t>& numbers, bool own);
  FailurePtr stop_sharing(Graph& graph);

  StorageTable& storages_;
  OpRunner& ops_;
  Outbox& outbox_;
  std::shared_ptr<Capture> capture_;
  std::shared_ptr<Compiler> compiler_;
  std::unordered_map<uint32_t, std::unique_ptr<Graph>> graphs_;
  std::unordered_map<uint32_t, Graph*> owners_;  // of the results of graphs
  std::unique_ptr<Graph> recording_;
  uint32_t recording_number_ = 0;
  uint64_t bytes_ = 0;  // of all steps
};

}  // namespace genie
