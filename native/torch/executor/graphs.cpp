#include "graphs.h"

#include <cstring>

namespace genie {

namespace {

uint32_t new_storage(const Template& call, const std::vector<uint8_t>& record, uint32_t index) {
  uint32_t number;
  std::memcpy(&number, record.data() + call.data_bytes + sizeof number * index, sizeof number);
  return number;
}

}  // namespace

// --- writing down -------------------------------------------------------------------------------

void Graphs::begin(uint32_t number) {
  if (recording()) throw ProtocolError("a graph is being recorded already");
  if (number >= GRAPHS_MAX)
    throw ProtocolError("graph " + std::to_string(number) + " is beyond the last one");
  if (graphs_.count(number)) throw ProtocolError("graph " + std::to_string(number) + " is in use already");
  recording_ = std::make_unique<Graph>();
  recording_number_ = number;
}

void Graphs::end(bool keep) {
  if (!recording()) throw ProtocolError("no graph is being recorded");
  if (keep) {
    for (uint32_t storage : recording_->alive) owners_[storage] = recording_.get();
    graphs_.emplace(recording_number_, std::move(recording_));
  }
  recording_.reset();
}

void Graphs::add(Step step) {
  if (recording_->steps.size() >= GRAPH_STEPS_MAX)
    throw ProtocolError("a graph has more steps than are allowed");
  recording_->steps.push_back(std::move(step));
}

void Graphs::op(const std::shared_ptr<Template>& call, const uint8_t* record, size_t bytes) {
  Step step{Record::Op, call, {record, record + bytes}};
  for (uint32_t i = 0; i < call->new_outputs; i++)
    recording_->alive.insert(new_storage(*call, step.record, i));
  add(std::move(step));
}

void Graphs::allocated(uint32_t storage, uint64_t bytes) {
  recording_->alive.insert(storage);
  add({Record::Allocate, nullptr, {}, storage, bytes});
}

void Graphs::freed(uint32_t storage) {
  // One that was there before is the client's own affair.
  if (recording_->alive.erase(storage)) add({Record::Free, nullptr, {}, storage});
}

void Graphs::let_go(uint32_t storage) {
  if (owners_.empty()) return;
  auto owner = owners_.find(storage);
  if (owner != owners_.end()) owner->second->unwanted.insert(storage);
}

FailurePtr Graphs::take_result(uint32_t result, uint32_t number) {
  auto owner = owners_.find(result);
  if (owner == owners_.end())
    throw ProtocolError("storage " + std::to_string(result) + " is no graph's result");
  storages_.check_free(number);
  Slot& slot = storages_.known(result);
  if (slot.failure) {
    storages_.poison(number, slot.failure);
    return nullptr;
  }
  try {
    storages_.share(number, slot);
  } catch (...) {
    FailurePtr failure = failure_at_hand("a captured graph", ops_.count());
    storages_.poison(number, failure);
    return failure;
  }
  owner->second->sharing.insert(number);
  return nullptr;
}

// --- carrying out again -------------------------------------------------------------------------

Graphs::Graph& Graphs::known(uint32_t number) {
  auto found = graphs_.find(number);
  if (found == graphs_.end())
    throw ProtocolError("graph " + std::to_string(number) + " is not known to this session");
  return *found->second;
}

FailurePtr Graphs::replay(uint32_t number) {
  if (recording()) throw ProtocolError("a graph was replayed while another is being recorded");
  Graph& graph = known(number);
  // The work has been done once, when it was written down, so everything is warm.
  if (capture_ && !graph.taken_down && !graph.cannot_be_captured) {
    graph.cannot_be_captured = !take_down(graph);
  }
  if (!graph.taken_down) return run(graph);
  FailurePtr failure = stop_sharing(graph);
  try {
    capture_->replay(graph.taken_down.get());
    return failure;
  } catch (...) {
    return failure_at_hand("a captured graph", ops_.count());
  }
}

// The accelerator is about to write where the results are, so whoever was given one gets memory of his own.
FailurePtr Graphs::stop_sharing(Graph& graph) {
  FailurePtr first;
  std::unordered_set<const c10::StorageImpl*> results;
  for (uint32_t storage : graph.alive) {
    const c10::Storage& memory = storages_.at(storage).storage;
    if (!memory) continue;
    outbox_.before_write(memory);
    results.insert(memory.unsafeGetStorageImpl());
  }
  for (uint32_t number : graph.sharing) {
    Slot& slot = storages_.at(number);  // may be free by now, or another one's
    if (!slot.storage || !results.count(slot.storage.unsafeGetStorageImpl())) continue;
    try {
      storages_.unshare(slot);
    } catch (...) {
      FailurePtr failure = failure_at_hand("a captured graph", ops_.count());
      storages_.spoil(slot, failure);
      if (!first) first = failure;
    }
  }
  graph.sharing.clear();
  return first;
}

// A result of the last time gives way to that of this time.
void Graphs::make_room(const Graph& graph, uint32_t storage) {
  if (!graph.alive.count(storage)) return;
  Slot& slot = storages_.at(storage);
  if (!slot.taken()) return;  // the client has let it go
  if (slot.storage) outbox_.before_free(slot.storage, slot.bytes);
  storages_.free(storage);
}

FailurePtr Graphs::run(Graph& graph) {
  FailurePtr first;
  for (Step& step : graph.steps) {
    FailurePtr failure;
    if (step.kind == Record::Op) {
      for (uint32_t i = 0; i < step.call->new_outputs; i++)
        make_room(graph, new_storage(*step.call, step.record, i));
      Reader in(step.record.data(), step.record.size());
      failure = ops_.run(*step.call, in);
    } else if (step.kind == Record::Allocate) {
      make_room(graph, step.storage);
      try {
        storages_.allocate(step.storage, step.bytes);
      } catch (...) {
        failure = failure_at_hand("", ops_.count());
        storages_.poison(step.storage, failure);
      }
    } else {
      storages_.free(step.storage);
    }
    if (failure && !first) first = failure;
  }
  for (uint32_t storage : graph.unwanted) make_room(graph, storage);
  return first;
}

// The steps are run once more, this time into a graph of the accelerator. It keeps the memory that they take.
bool Graphs::take_down(Graph& graph) {
  try {
    capture_->begin();
  } catch (...) {
    return false;
  }
  FailurePtr failure;
  try {
    failure = run(graph);
  } catch (...) {
    capture_->abandon();
    throw;
  }
  if (failure) {
    capture_->abandon();
    return false;
  }
  try {
    graph.taken_down = capture_->end();
  } catch (...) {
    return false;
  }
  return true;
}

void Graphs::free(uint32_t number) {
  for (uint32_t storage : known(number).alive) owners_.erase(storage);
  graphs_.erase(number);
}

void Graphs::clear() {
  recording_.reset();
  owners_.clear();
  graphs_.clear();
}

}  // namespace genie
