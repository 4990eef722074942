#include "graphs.h"

#include <algorithm>

#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>

namespace genie {

namespace {

// A graph whose tensors get other memory is taken down again so often, and then no more.
constexpr int CAPTURES_MAX = 8;
constexpr size_t REASON_BYTES_MAX = 1000;
constexpr const char* HOST_NUMBER = "a number that it reads is in host memory";

uint32_t new_storage(const Template& call, const std::vector<uint8_t>& record, uint32_t index) {
  const uint8_t* place = record.data() + call.data_bytes + sizeof(uint32_t) * index;
  return next_data<uint32_t>(place);
}

std::string reason(const Failure& failure) {
  std::string text = failure.op.empty() ? failure.message : failure.op + ": " + failure.message;
  if (text.size() <= REASON_BYTES_MAX) return text;
  text.resize(REASON_BYTES_MAX);
  while (!text.empty() && (text.back() & 0x80)) text.pop_back();  // no half characters
  return text;
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

void Graphs::end(uint32_t how) {
  if (!recording()) throw ProtocolError("no graph is being recorded");
  if (how > GRAPH_COMPILE) throw ProtocolError("a graph ends in an unknown way");
  std::unique_ptr<Graph> graph = std::move(recording_);
  if (how == GRAPH_FORGET) {
    bytes_ -= graph->bytes;
    return;
  }
  graph->to_be_compiled = how == GRAPH_COMPILE;
  graph->warm = true;  // the work has just been done once
  for (uint32_t number : graph->outside) {
    Slot& slot = storages_.at(number);
    slot.watchers++;
    graph->outside_bytes.emplace_back(number, slot.bytes);
  }
  for (uint32_t number : graph->alive) {
    storages_.at(number).watchers++;
    owners_[number] = graph.get();
  }
  graphs_.emplace(recording_number_, std::move(graph));
}

void Graphs::add(GraphStep step) {
  if (recording_->steps.size() >= GRAPH_STEPS_MAX)
    throw ProtocolError("a graph has more steps than are allowed");
  // The sets of numbers grow with the records that name them.
  uint64_t bytes = sizeof step + 4 * step.record.size();
  recording_->bytes += bytes;
  bytes_ += bytes;
  if (bytes_ > GRAPH_BYTES_MAX) throw ProtocolError("the graphs hold more than is allowed");
  recording_->steps.push_back(std::move(step));
}

void Graphs::note_made(uint32_t storage) {
  storages_.at(storage);  // no number beyond the last
  // It would be read before it is made, where the last replay has left it.
  if (recording_->outside.count(storage)) throw ProtocolError("a graph makes a storage that was there");
  recording_->made.insert(storage);
  recording_->alive.insert(storage);
}

void Graphs::note_given(const std::vector<Argument>& arguments, const uint8_t* data) {
  each_tensor(arguments, data, [this](const Argument& argument, uint32_t number) {
    storages_.at(number);  // no number beyond the last
    if (recording_->made.count(number)) return;
    recording_->outside.insert(number);
    if (argument.written) recording_->written.insert(number);
  });
}

void Graphs::op(const std::shared_ptr<Template>& call, const uint8_t* record, size_t bytes) {
  GraphStep step{Record::Op, call, {record, record + bytes}};
  note_given(call->arguments, record);
  for (uint32_t i = 0; i < call->new_outputs; i++) note_made(new_storage(*call, step.record, i));
  add(std::move(step));
}

void Graphs::allocated(uint32_t storage, uint64_t bytes) {
  note_made(storage);
  add({Record::Allocate, nullptr, {}, storage, bytes});
}

void Graphs::freed(uint32_t storage) {
  // One that was there before is the client's own affair.
  if (recording_->alive.erase(storage)) add({Record::Free, nullptr, {}, storage});
}

// --- what the client does with a graph's storages -----------------------------------------------

// The memory of a result is the graph's own once the accelerator has taken it down: the next replay writes
// to it again, whoever still reads it.
void Graphs::before_free(uint32_t number, const Slot& slot) {
  if (!slot.storage || !outbox_.lends()) return;
  if (slot.watchers > 0) {
    for (auto& [_, graph] : graphs_)
      if (graph->taken_down.work && graph->alive.count(number)) outbox_.before_write(slot.storage);
  }
  outbox_.before_free(slot.storage, slot.bytes);
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
  Graph& graph = *owner->second;
  bool first = graph.given.insert(result).second;
  try {
    storages_.share(number, slot);
    // Two that have been given the same may be written to, each for itself.
    if (!first) storages_.unshare(storages_.known(number));
  } catch (...) {
    FailurePtr failure = failure_at_hand("a captured graph", ops_.count());
    if (storages_.at(number).taken()) storages_.free(number);
    storages_.poison(number, failure);
    return failure;
  }
  // Without that the next replay makes its results anew, and this one may have the old memory.
  if (first && graph.taken_down.work) graph.sharing.insert(number);
  return nullptr;
}

void Graphs::let_go(uint32_t number) {
  if (storages_.at(number).watchers == 0) return;
  for (auto& [_, graph] : graphs_)
    if (graph->alive.count(number)) graph->unwanted.insert(number);
  moved(number);
}

// What is held for a graph counts for nothing in the quota, so it is not held longer than it can be used.
void Graphs::moved(uint32_t number) {
  if (storages_.at(number).watchers == 0) return;
  for (auto& [_, graph] : graphs_)
    if (graph->outside.count(number)) give_up(*graph);
}

void Graphs::give_up(Graph& graph) {
  storages_.count(-static_cast<int64_t>(graph.taken_down.bytes));
  graph.taken_down = {};
  graph.held.clear();
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
  graph.replays++;
  graph.given.clear();
  if (outbox_.lends()) keep_replies(graph);
  if (graph.taken_down.work && !is_current(graph)) give_up(graph);
  if (!graph.taken_down.work) {
    if (!is_sound(graph)) return run_steps(graph);
    if (graph.to_be_compiled) compile(graph);
    if (may_be_taken_down(graph)) take_down(graph);
    if (!graph.taken_down.work) return run(graph);
  }
  FailurePtr failure = stop_sharing(graph);
  try {
    capture_->replay(graph.taken_down.work.get());
    return failure;
  } catch (...) {
    return failure_at_hand("a captured graph", ops_.count());
  }
}

// The accelerator is about to write where the results are, so whoever was given one gets memory of his own.
FailurePtr Graphs::stop_sharing(Graph& graph) {
  FailurePtr first;
  auto is_result = [&graph](const c10::Storage& storage) {
    for (const Held& held : graph.held)
      if (held.own && held.storage.is_alias_of(storage)) return true;
    return false;
  };
  for (uint32_t number : graph.sharing) {
    Slot& slot = storages_.at(number);  // may be free by now, or another one's
    if (!slot.storage || !is_result(slot.storage)) continue;
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

// Whether all that it needs is there. If not, the steps tell each result of it.
bool Graphs::is_sound(const Graph& graph) {
  bool sound = true;
  for (auto& [number, bytes] : graph.outside_bytes) {
    const Slot& slot = storages_.known(number);
    sound = !slot.failure && slot.bytes >= bytes && sound;
  }
  return sound;
}

// Replies that were not received yet must not change with what they show. The steps see to that themselves;
// what was compiled or taken down does not.
void Graphs::keep_replies(const Graph& graph) {
  auto keep = [this](uint32_t number) {
    const Slot& slot = storages_.at(number);
    if (slot.storage) outbox_.before_write(slot.storage);
  };
  for (uint32_t number : graph.written) keep(number);
  for (const Held& held : graph.held)
    if (held.own) outbox_.before_write(held.storage);
}

GraphReport Graphs::report(uint32_t number) {
  const Graph& graph = known(number);
  GraphReport made;
  made.replays = graph.replays;
  bool captured = graph.taken_down.work != nullptr;
  if (graph.compiled) {
    made.how = captured ? ReplayKind::InductorInCudaGraph : ReplayKind::Inductor;
  } else {
    made.how = captured ? ReplayKind::CudaGraph : ReplayKind::Steps;
  }
  auto add = [&made](const std::string& what) { made.why += made.why.empty() ? what : "; " + what; };
  if (!graph.why_not_compiled.empty()) add("not compiled: " + graph.why_not_compiled);
  if (!capture_) add("no CUDA graph: the accelerator has none");
  if (!captured && !graph.why_not_captured.empty()) add("no CUDA graph: " + graph.why_not_captured);
  return made;
}

FailurePtr Graphs::run(Graph& graph) {
  return graph.compiled && !reads_host_memory(graph) ? run_compiled(graph) : run_steps(graph);
}

// A number that an op has left there. Steps can use it; what is compiled or taken down would not.
bool Graphs::reads_host_memory(const Graph& graph) {
  if (storages_.device().is_cpu()) return false;
  for (uint32_t number : graph.outside)
    if (storages_.known(number).storage.device() != storages_.device()) return true;
  return false;
}

// A result of the last time gives way to that of this time.
void Graphs::make_room(const Graph& graph, uint32_t storage) {
  if (!graph.alive.count(storage)) return;
  Slot& slot = storages_.at(storage);
  if (!slot.taken()) return;  // the client has let it go
  if (slot.storage) outbox_.before_free(slot.storage, slot.bytes);
  storages_.free(storage);
}

void Graphs::free_unwanted(const Graph& graph) {
  for (uint32_t storage : graph.unwanted) make_room(graph, storage);
}

FailurePtr Graphs::run_step(Graph& graph, GraphStep& step) {
  if (step.kind == Record::Op) {
    for (uint32_t i = 0; i < step.call->new_outputs; i++)
      make_room(graph, new_storage(*step.call, step.record, i));
    Reader in(step.record.data(), step.record.size());
    return ops_.run(*step.call, in);
  }
  if (step.kind == Record::Free) {
    storages_.free(step.storage);
    return nullptr;
  }
  make_room(graph, step.storage);
  try {
    storages_.allocate(step.storage, step.bytes);
    return nullptr;
  } catch (...) {
    FailurePtr failure = failure_at_hand("memory of a captured graph", ops_.count());
    storages_.poison(step.storage, failure);
    return failure;
  }
}

FailurePtr Graphs::run_steps(Graph& graph) {
  FailurePtr first;
  for (GraphStep& step : graph.steps) {
    FailurePtr failure = run_step(graph, step);
    if (failure && !first) first = failure;
  }
  free_unwanted(graph);
  return first;
}

// --- one function instead of the steps ----------------------------------------------------------

void Graphs::compile(Graph& graph) {
  graph.to_be_compiled = false;
  if (!compiler_) graph.why_not_compiled = "this executor has no compiler";
  if (reads_host_memory(graph)) graph.why_not_compiled = HOST_NUMBER;
  if (!graph.why_not_compiled.empty()) return;
  std::vector<uint32_t> wanted;
  for (uint32_t number : graph.alive)
    if (!graph.unwanted.count(number)) wanted.push_back(number);
  std::sort(wanted.begin(), wanted.end());
  std::unordered_map<uint32_t, uint64_t> sizes;
  for (uint32_t number : graph.outside) sizes.emplace(number, storages_.known(number).bytes);
  try {
    Compiled compiled = compiler_->compile(graph.steps, wanted, sizes, [this] { outbox_.acknowledge(); });
    for (const View& view : compiled.inputs) {
      auto found = sizes.find(view.storage);
      uint64_t end = static_cast<uint64_t>(view.offset) * view.look.item_bytes + view.look.span_bytes;
      if (found == sizes.end() || end > found->second) throw Refused("it would reach beyond its memory");
    }
    graph.compiled = std::move(compiled);
    graph.warm = false;
  } catch (...) {
    graph.why_not_compiled = reason(*failure_at_hand("", ops_.count()));
  }
}

// The memory that the function takes on the way is not counted, like that of a single op; the limits on the
// process hold for it. Its results are.
FailurePtr Graphs::run_compiled(Graph& graph) {
  FailurePtr failure;
  try {
    std::vector<at::Tensor> inputs;
    inputs.reserve(graph.compiled->inputs.size());
    for (const View& view : graph.compiled->inputs)
      inputs.push_back(storages_.view(storages_.known(view.storage), view.look, view.offset));
    for (const View& view : graph.compiled->results) make_room(graph, view.storage);
    storages_.check_room(graph.compiled->result_bytes);
    std::vector<at::Tensor> results = compiler_->run(graph.compiled->function.get(), inputs);
    keep_results(graph, inputs, std::move(results));
    graph.warm = true;
  } catch (...) {
    failure = failure_at_hand("a compiled graph", ops_.count());
    for (const View& view : graph.compiled->results) {
      make_room(graph, view.storage);
      storages_.poison(view.storage, failure);
    }
  }
  free_unwanted(graph);
  return failure;
}

void Graphs::keep_results(Graph& graph, const std::vector<at::Tensor>& inputs,
                          std::vector<at::Tensor> results) {
  const std::vector<View>& expected = graph.compiled->results;
  if (results.size() != expected.size()) throw Mispredicted("a compiled graph gives other results");
  std::unordered_set<const c10::StorageImpl*> taken;
  for (const at::Tensor& input : inputs) taken.insert(input.storage().unsafeGetStorageImpl());
  for (size_t i = 0; i < results.size(); i++) {
    at::Tensor own = own_result(results[i], expected[i].look, taken);
    results[i].reset();
    storages_.keep(expected[i].storage, std::move(own));
  }
}

// A compiler may give the same memory twice, or what was given, or another order of strides.
at::Tensor Graphs::own_result(const at::Tensor& found, const Look& look,
                              std::unordered_set<const c10::StorageImpl*>& taken) const {
  if (!found.defined() || found.scalar_type() != look.dtype ||
      found.sizes() != c10::IntArrayRef(look.sizes)) {
    throw Mispredicted("a compiled graph gives something else than " + described(look.dtype, look.sizes));
  }
  bool own = taken.insert(found.storage().unsafeGetStorageImpl()).second && storages_.is_plain(found) &&
             look.fits(found, 0) && look.span_bytes <= found.storage().nbytes();
  if (own) return at::alias(found);  // not the one that the interpreter knows
  auto options = at::TensorOptions().dtype(look.dtype).device(storages_.device());
  at::Tensor copy = at::empty_strided(look.sizes, look.strides, options);
  copy.copy_(found);
  return copy;
}

// --- the accelerator's own graphs ---------------------------------------------------------------

bool Graphs::may_be_taken_down(Graph& graph) {
  if (!capture_ || !graph.warm || !graph.why_not_captured.empty()) return false;
  if (graph.captures >= CAPTURES_MAX) graph.why_not_captured = "its tensors get other memory too often";
  if (reads_host_memory(graph)) graph.why_not_captured = HOST_NUMBER;
  return graph.why_not_captured.empty();
}

void Graphs::hold(Graph& graph, const std::unordered_set<uint32_t>& numbers, bool own) {
  for (uint32_t number : numbers) {
    Slot& slot = storages_.at(number);
    if (slot.storage)
      graph.held.push_back({&slot, slot.storage, slot.storage.data(), slot.storage.nbytes(), own});
  }
}

// Whether everything is still where it was when it was taken down.
bool Graphs::is_current(Graph& graph) {
  if (graph.changes_seen == storages_.watched_changes()) return true;
  for (const Held& held : graph.held) {
    const c10::Storage& now = held.slot->storage;
    if (held.own && !held.slot->taken()) continue;
    if (!now || !now.is_alias_of(held.storage) || now.data() != held.memory || now.nbytes() != held.bytes)
      return false;
  }
  graph.changes_seen = storages_.watched_changes();
  return true;
}

// The work is done once more, this time into a graph of the accelerator. That keeps the memory which it takes
// on the way in a pool of its own, for as long as it lives: all of the pool counts for the quota, the results
// in it a second time.
void Graphs::take_down(Graph& graph) {
  graph.captures++;
  FailurePtr failure;
  TakenDown taken;
  try {
    hold(graph, graph.outside, /*own=*/false);
    capture_->begin();
    failure = run_into(taken, graph);
  } catch (const std::exception&) {
    failure = failure_at_hand("", ops_.count());
  }
  if (failure) {
    graph.why_not_captured = reason(*failure);
    graph.held.clear();
    return;
  }
  hold(graph, graph.alive, /*own=*/true);
  storages_.count(static_cast<int64_t>(taken.bytes));
  graph.taken_down = std::move(taken);
  graph.changes_seen = storages_.watched_changes();
}

FailurePtr Graphs::run_into(TakenDown& taken, Graph& graph) {
  FailurePtr failure;
  try {
    failure = run(graph);
  } catch (const AcceleratorLost& error) {
    // Work that must wait for the accelerator fails like this, and does no harm while it is taken down.
    if (!capture_->abandon()) throw;
    ops_.let_go();
    forget_made(graph);
    return std::make_shared<Failure>(Failure{"", "", ops_.count(), error.what()});
  } catch (...) {
    capture_->abandon();
    throw;
  }
  if (failure) {
    if (!capture_->abandon()) throw AcceleratorLost(failure->message);
    return failure;
  }
  taken = capture_->end();
  storages_.check_room(taken.bytes);
  return nullptr;
}

// The steps broke off: what they would have freed later is still there.
void Graphs::forget_made(const Graph& graph) {
  for (uint32_t number : graph.made)
    if (storages_.at(number).taken()) storages_.free(number);
}

void Graphs::free(uint32_t number) {
  Graph& graph = known(number);
  give_up(graph);
  for (uint32_t outside : graph.outside) storages_.at(outside).watchers--;
  for (uint32_t result : graph.alive) {
    storages_.at(result).watchers--;
    auto owner = owners_.find(result);
    if (owner != owners_.end() && owner->second == &graph) owners_.erase(owner);
  }
  bytes_ -= graph.bytes;
  graphs_.erase(number);
}

void Graphs::clear() {
  recording_.reset();
  owners_.clear();
  for (auto& [_, graph] : graphs_) give_up(*graph);
  graphs_.clear();
  bytes_ = 0;
}

}  // namespace genie
