// Records that were written down, to be carried out again by one word of the client. On an accelerator that
// can, the first replay becomes a graph of its own (CUDA graphs), and from then on the accelerator replays it
// alone. Not for: carrying a single record out (ops.h).
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../wire.h"
#include "failure.h"
#include "ops.h"
#include "outbox.h"
#include "storages.h"
#include "templates.h"

namespace genie {

// How the accelerator takes down work instead of doing it. One at a time.
class Capture {
 public:
  virtual ~Capture() = default;
  virtual void begin() = 0;
  // What was taken down, to be given to replay().
  virtual std::shared_ptr<void> end() = 0;
  // Ends without a result, after something went wrong.
  virtual void abandon() noexcept = 0;
  virtual void replay(void* taken_down) = 0;
};

class Graphs {
 public:
  // `capture` may be null: then every replay is carried out step by step.
  Graphs(StorageTable& storages, OpRunner& ops, Outbox& outbox, std::shared_ptr<Capture> capture)
      : storages_(storages), ops_(ops), outbox_(outbox), capture_(std::move(capture)) {}

  bool recording() const { return recording_ != nullptr; }
  void begin(uint32_t number);
  void end(bool keep);
  // While recording, after each has been carried out.
  void op(const std::shared_ptr<Template>& call, const uint8_t* record, size_t bytes);
  void allocated(uint32_t storage, uint64_t bytes);
  void freed(uint32_t storage);
  // The client has let go of a storage outside of a recording; a graph whose result it is does not keep it.
  void let_go(uint32_t storage);

  // The storage `number` is to have what `result`, a graph's result, has now. A replay that takes place on
  // the accelerator writes over the result, and copies it first if `number` is still there; so most are never
  // copied.
  FailurePtr take_result(uint32_t result, uint32_t number);

  // The first failure, when there was one.
  FailurePtr replay(uint32_t number);
  void free(uint32_t number);
  void clear();

 private:
  struct Step {
    Record kind;
    std::shared_ptr<Template> call;
    std::vector<uint8_t> record;  // what follows the head of an Op
    uint32_t storage = 0;
    uint64_t bytes = 0;
  };
  struct Graph {
    std::vector<Step> steps;
    std::unordered_set<uint32_t> alive;     // storages made in it and not freed in it
    std::unordered_set<uint32_t> unwanted;  // of those, what the client has freed since
    std::unordered_set<uint32_t> sharing;   // storages that were given the memory of a result
    bool cannot_be_captured = false;
    std::shared_ptr<void> taken_down;
  };

  Graph& known(uint32_t number);
  void add(Step step);
  FailurePtr run(Graph& graph);
  void make_room(const Graph& graph, uint32_t storage);
  bool take_down(Graph& graph);
  FailurePtr stop_sharing(Graph& graph);

  StorageTable& storages_;
  OpRunner& ops_;
  Outbox& outbox_;
  std::shared_ptr<Capture> capture_;
  std::unordered_map<uint32_t, std::unique_ptr<Graph>> graphs_;
  std::unordered_map<uint32_t, Graph*> owners_;  // of the results of graphs
  std::unique_ptr<Graph> recording_;
  uint32_t recording_number_ = 0;
};

}  // namespace genie
