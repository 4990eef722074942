#include "graphs.h"

#include <algorithm>

#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>

namespace genie {

namespace {

// A graph whose tensors move is captured again up to this number of times.
constexpr int CAPTURES_MAX = 8;
constexpr size_t REASON_BYTES_MAX = 1000;
constexpr const char* HOST_SCALAR = "a scalar that it reads is in host memory";

uint32_t step_output(const Template& call, const std::vector<uint8_t>& record, uint32_t index) {
  const uint8_t* position = record.data() + call.data_bytes + sizeof(uint32_t) * index;
  return next_data<uint32_t>(position);
}

std::string format_reason(const Failure& failure) {
  std::string text = failure.op.empty() ? failure.message : failure.op + ": " + failure.message;
  if (text.size() <= REASON_BYTES_MAX) return text;
  text.resize(REASON_BYTES_MAX);
  while (!text.empty() && (text.back() & 0x80)) text.pop_back();  // no partial characters
  return text;
}

}  // namespace

// --- recording ----------------------------------------------------------------------------------

void Graphs::begin(uint32_t number) {
  if (recording()) throw ProtocolError("a graph is already being recorded");
  if (number >= GRAPHS_MAX) throw ProtocolError("graph " + std::to_string(number) + " is out of range");
  if (graphs_.count(number)) throw ProtocolError("graph " + std::to_string(number) + " already exists");
  recording_ = std::make_unique<Graph>();
  recording_number_ = number;
}

void Graphs::end(uint32_t mode) {
  if (!recording()) throw ProtocolError("no graph is being recorded");
  if (mode > GRAPH_COMPILE) throw ProtocolError("a GraphEnd has an unknown mode");
  std::unique_ptr<Graph> graph = std::move(recording_);
  if (mode == GRAPH_DISCARD) {
    bytes_ -= graph->bytes;
    return;
  }
  graph->compile_pending = mode == GRAPH_COMPILE;
  graph->warm = true;  // the steps have just run
  for (uint32_t number : graph->inputs) {
    Slot& slot = storages_.at(number);
    slot.graph_uses++;
    graph->input_bytes.emplace_back(number, slot.bytes);
  }
  for (uint32_t number : graph->results) {
    storages_.at(number).graph_uses++;
    owners_[number] = graph.get();
  }
  graphs_.emplace(recording_number_, std::move(graph));
}

void Graphs::add_step(GraphStep step) {
  if (recording_->steps.size() >= GRAPH_STEPS_MAX) throw ProtocolError("a graph has too many steps");
  // Includes the sets of storage numbers, which grow with the records.
  uint64_t bytes = sizeof step + 4 * step.record.size();
  recording_->bytes += bytes;
  bytes_ += bytes;
  if (bytes_ > GRAPH_BYTES_MAX) throw ProtocolError("the graphs exceed the maximum size");
  recording_->steps.push_back(std::move(step));
}

void Graphs::add_created(uint32_t storage) {
  storages_.at(storage);  // checks the number
  // Its first read would see the contents of the previous replay.
  if (recording_->inputs.count(storage)) throw ProtocolError("a graph creates a storage that it used before");
  recording_->created.insert(storage);
  recording_->results.insert(storage);
}

void Graphs::add_inputs(const std::vector<Argument>& arguments, const uint8_t* data) {
  for_each_tensor(arguments, data, [this](const Argument& argument, uint32_t number) {
    storages_.at(number);  // checks the number
    if (recording_->created.count(number)) return;
    recording_->inputs.insert(number);
    if (argument.written) recording_->written.insert(number);
  });
}

void Graphs::record_op(const std::shared_ptr<Template>& call, const uint8_t* record, size_t bytes) {
  GraphStep step{Record::Op, call, {record, record + bytes}};
  add_inputs(call->arguments, record);
  for (uint32_t i = 0; i < call->new_outputs; i++) add_created(step_output(*call, step.record, i));
  add_step(std::move(step));
}

void Graphs::record_allocate(uint32_t storage, uint64_t bytes) {
  add_created(storage);
  add_step({Record::Allocate, nullptr, {}, storage, bytes});
}

void Graphs::record_free(uint32_t storage) {
  // Freeing an input is not part of the graph.
  if (recording_->results.erase(storage)) add_step({Record::Free, nullptr, {}, storage});
}

// --- storages of graphs -------------------------------------------------------------------------

// After a capture the memory of a result belongs to the graph: every replay overwrites it.
void Graphs::before_free(uint32_t number, const Slot& slot) {
  if (!slot.storage || !replies_.has_borrowed_tensors()) return;
  if (slot.graph_uses > 0) {
    for (auto& [_, graph] : graphs_)
      if (graph->captured.graph && graph->results.count(number)) replies_.before_write(slot.storage);
  }
  replies_.before_free(slot.storage, slot.bytes);
}

FailurePtr Graphs::share_result(uint32_t result, uint32_t number) {
  auto owner = owners_.find(result);
  if (owner == owners_.end())
    throw ProtocolError("storage " + std::to_string(result) + " is not a result of a graph");
  storages_.check_unused(number);
  Slot& slot = storages_.get(result);
  if (slot.failure) {
    storages_.poison(number, slot.failure);
    return nullptr;
  }
  Graph& graph = *owner->second;
  bool first = graph.shared.insert(result).second;
  try {
    storages_.share(number, slot);
    // Two storages with the same result must be writable independently.
    if (!first) storages_.unshare(storages_.get(number));
  } catch (...) {
    FailurePtr failure = current_failure("a captured graph", ops_.count());
    if (storages_.at(number).in_use()) storages_.free(number);
    storages_.poison(number, failure);
    return failure;
  }
  // Without a capture the next replay allocates new results, and this storage keeps the old memory.
  if (first && graph.captured.graph) graph.sharing.insert(number);
  return nullptr;
}

void Graphs::on_storage_freed(uint32_t number) {
  if (storages_.at(number).graph_uses == 0) return;
  for (auto& [_, graph] : graphs_)
    if (graph->results.count(number)) graph->freed_results.insert(number);
  on_storage_moved(number);
}

// Captured storages do not count towards the quota, so they are released as soon as they are unusable.
void Graphs::on_storage_moved(uint32_t number) {
  if (storages_.at(number).graph_uses == 0) return;
  for (auto& [_, graph] : graphs_)
    if (graph->inputs.count(number)) release_capture(*graph);
}

void Graphs::release_capture(Graph& graph) {
  storages_.add_bytes(-static_cast<int64_t>(graph.captured.pool_bytes));
  graph.captured = {};
  graph.captured_storages.clear();
}

// --- replay -------------------------------------------------------------------------------------

Graphs::Graph& Graphs::get(uint32_t number) {
  auto found = graphs_.find(number);
  if (found == graphs_.end()) throw ProtocolError("graph " + std::to_string(number) + " does not exist");
  return *found->second;
}

FailurePtr Graphs::replay(uint32_t number) {
  if (recording()) throw ProtocolError("a graph is replayed while another is being recorded");
  Graph& graph = get(number);
  graph.replays++;
  graph.shared.clear();
  if (replies_.has_borrowed_tensors()) copy_borrowed_replies(graph);
  if (graph.captured.graph && !is_capture_valid(graph)) release_capture(graph);
  if (!graph.captured.graph) {
    if (!has_valid_inputs(graph)) return run_steps(graph);
    if (graph.compile_pending) compile(graph);
    if (can_capture(graph)) capture(graph);
    if (!graph.captured.graph) return run(graph);
  }
  FailurePtr failure = unshare_results(graph);
  try {
    capture_->replay(graph.captured.graph.get());
    return failure;
  } catch (...) {
    return current_failure("a captured graph", ops_.count());
  }
}

// A captured replay overwrites the results, so storages that share them get separate memory.
FailurePtr Graphs::unshare_results(Graph& graph) {
  FailurePtr first;
  auto is_result = [&graph](const c10::Storage& storage) {
    for (const CapturedStorage& saved : graph.captured_storages)
      if (saved.is_result && saved.storage.is_alias_of(storage)) return true;
    return false;
  };
  for (uint32_t number : graph.sharing) {
    Slot& slot = storages_.at(number);  // may have been freed or reused
    if (!slot.storage || !is_result(slot.storage)) continue;
    try {
      storages_.unshare(slot);
    } catch (...) {
      FailurePtr failure = current_failure("a captured graph", ops_.count());
      storages_.poison_slot(slot, failure);
      if (!first) first = failure;
    }
  }
  graph.sharing.clear();
  return first;
}

// If not, the steps are run, which poison each affected result.
bool Graphs::has_valid_inputs(const Graph& graph) {
  bool valid = true;
  for (auto& [number, bytes] : graph.input_bytes) {
    const Slot& slot = storages_.get(number);
    valid = !slot.failure && slot.bytes >= bytes && valid;
  }
  return valid;
}

// Unreceived replies must keep their contents. Steps ensure that; compiled and captured graphs do not.
void Graphs::copy_borrowed_replies(const Graph& graph) {
  auto keep = [this](uint32_t number) {
    const Slot& slot = storages_.at(number);
    if (slot.storage) replies_.before_write(slot.storage);
  };
  for (uint32_t number : graph.written) keep(number);
  for (const CapturedStorage& saved : graph.captured_storages)
    if (saved.is_result) replies_.before_write(saved.storage);
}

GraphReport Graphs::report(uint32_t number) {
  const Graph& graph = get(number);
  GraphReport result;
  result.replays = graph.replays;
  bool captured = graph.captured.graph != nullptr;
  if (graph.compiled) {
    result.kind = captured ? ReplayKind::InductorInCudaGraph : ReplayKind::Inductor;
  } else {
    result.kind = captured ? ReplayKind::CudaGraph : ReplayKind::Steps;
  }
  auto add = [&result](const std::string& what) {
    result.reason += result.reason.empty() ? what : "; " + what;
  };
  if (!graph.why_not_compiled.empty()) add("not compiled: " + graph.why_not_compiled);
  if (!capture_) add("no CUDA graph: the accelerator does not support it");
  if (!captured && !graph.why_not_captured.empty()) add("no CUDA graph: " + graph.why_not_captured);
  return result;
}

FailurePtr Graphs::run(Graph& graph) {
  return graph.compiled && !reads_host_memory(graph) ? run_compiled(graph) : run_steps(graph);
}

// An op may return a scalar in host memory; compiled and captured graphs cannot read it.
bool Graphs::reads_host_memory(const Graph& graph) {
  if (storages_.device().is_cpu()) return false;
  for (uint32_t number : graph.inputs)
    if (storages_.get(number).storage.device() != storages_.device()) return true;
  return false;
}

void Graphs::free_previous_result(const Graph& graph, uint32_t storage) {
  if (!graph.results.count(storage)) return;
  Slot& slot = storages_.at(storage);
  if (!slot.in_use()) return;  // freed by the client
  if (slot.storage) replies_.before_free(slot.storage, slot.bytes);
  storages_.free(storage);
}

void Graphs::free_unused_results(const Graph& graph) {
  for (uint32_t storage : graph.freed_results) free_previous_result(graph, storage);
}

FailurePtr Graphs::run_step(Graph& graph, GraphStep& step) {
  if (step.kind == Record::Op) {
    for (uint32_t i = 0; i < step.call->new_outputs; i++)
      free_previous_result(graph, step_output(*step.call, step.record, i));
    Reader in(step.record.data(), step.record.size());
    return ops_.run(*step.call, in);
  }
  if (step.kind == Record::Free) {
    storages_.free(step.storage);
    return nullptr;
  }
  free_previous_result(graph, step.storage);
  try {
    storages_.allocate(step.storage, step.bytes);
    return nullptr;
  } catch (...) {
    FailurePtr failure = current_failure("memory of a captured graph", ops_.count());
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
  free_unused_results(graph);
  return first;
}

// --- compiled graphs ----------------------------------------------------------------------------

void Graphs::compile(Graph& graph) {
  graph.compile_pending = false;
  if (!compiler_) graph.why_not_compiled = "this executor has no compiler";
  if (reads_host_memory(graph)) graph.why_not_compiled = HOST_SCALAR;
  if (!graph.why_not_compiled.empty()) return;
  std::vector<uint32_t> results;
  for (uint32_t number : graph.results)
    if (!graph.freed_results.count(number)) results.push_back(number);
  std::sort(results.begin(), results.end());
  std::unordered_map<uint32_t, uint64_t> sizes;
  for (uint32_t number : graph.inputs) sizes.emplace(number, storages_.get(number).bytes);
  try {
    CompiledGraph compiled =
        compiler_->compile(graph.steps, results, sizes, [this] { replies_.acknowledge(); });
    for (const View& view : compiled.inputs) {
      auto found = sizes.find(view.storage);
      uint64_t end = static_cast<uint64_t>(view.offset) * view.meta.item_bytes + view.meta.span_bytes;
      if (found == sizes.end() || end > found->second) throw OpRefused("an input exceeds its storage");
    }
    graph.compiled = std::move(compiled);
    graph.warm = false;
  } catch (...) {
    graph.why_not_compiled = format_reason(*current_failure("", ops_.count()));
  }
}

// Temporary memory is not counted, as for a single op; the memory limit of the process applies to it.
FailurePtr Graphs::run_compiled(Graph& graph) {
  FailurePtr failure;
  try {
    std::vector<at::Tensor> inputs;
    inputs.reserve(graph.compiled->inputs.size());
    for (const View& view : graph.compiled->inputs)
      inputs.push_back(storages_.view(storages_.get(view.storage), view.meta, view.offset));
    for (const View& view : graph.compiled->results) free_previous_result(graph, view.storage);
    storages_.check_quota(graph.compiled->result_bytes);
    std::vector<at::Tensor> results = compiler_->run(graph.compiled->function.get(), inputs);
    store_results(graph, inputs, std::move(results));
    graph.warm = true;
  } catch (...) {
    failure = current_failure("a compiled graph", ops_.count());
    for (const View& view : graph.compiled->results) {
      free_previous_result(graph, view.storage);
      storages_.poison(view.storage, failure);
    }
  }
  free_unused_results(graph);
  return failure;
}

void Graphs::store_results(Graph& graph, const std::vector<at::Tensor>& inputs,
                           std::vector<at::Tensor> results) {
  const std::vector<View>& expected = graph.compiled->results;
  if (results.size() != expected.size())
    throw OutputMismatch("a compiled graph returned another number of results");
  std::unordered_set<const c10::StorageImpl*> used;
  for (const at::Tensor& input : inputs) used.insert(input.storage().unsafeGetStorageImpl());
  for (size_t i = 0; i < results.size(); i++) {
    at::Tensor result = to_unshared_result(results[i], expected[i].meta, used);
    results[i].reset();
    storages_.store(expected[i].storage, std::move(result));
  }
}

// Compiled functions may return the same memory twice, an input, or other strides.
at::Tensor Graphs::to_unshared_result(const at::Tensor& found, const TensorMeta& meta,
                                      std::unordered_set<const c10::StorageImpl*>& used) const {
  if (!found.defined() || found.scalar_type() != meta.dtype ||
      found.sizes() != c10::IntArrayRef(meta.sizes)) {
    throw OutputMismatch("a compiled graph returned another tensor than " +
                         describe_tensor(meta.dtype, meta.sizes));
  }
  bool unshared = used.insert(found.storage().unsafeGetStorageImpl()).second && storages_.is_plain(found) &&
                  meta.matches(found, 0) && meta.span_bytes <= found.storage().nbytes();
  if (unshared) return at::alias(found);  // without the Python object of `found`
  auto options = at::TensorOptions().dtype(meta.dtype).device(storages_.device());
  at::Tensor copy = at::empty_strided(meta.sizes, meta.strides, options);
  copy.copy_(found);
  return copy;
}

// --- captured graphs ----------------------------------------------------------------------------

bool Graphs::can_capture(Graph& graph) {
  if (!capture_ || !graph.warm || !graph.why_not_captured.empty()) return false;
  if (graph.captures >= CAPTURES_MAX) graph.why_not_captured = "its tensors moved too often";
  if (reads_host_memory(graph)) graph.why_not_captured = HOST_SCALAR;
  return graph.why_not_captured.empty();
}

void Graphs::add_captured_storages(Graph& graph, const std::unordered_set<uint32_t>& numbers,
                                   bool are_results) {
  for (uint32_t number : numbers) {
    Slot& slot = storages_.at(number);
    if (slot.storage)
      graph.captured_storages.push_back(
          {&slot, slot.storage, slot.storage.data(), slot.storage.nbytes(), are_results});
  }
}

// Whether all storages still have the memory that was captured.
bool Graphs::is_capture_valid(Graph& graph) {
  if (graph.changes_seen == storages_.graph_storage_changes()) return true;
  for (const CapturedStorage& saved : graph.captured_storages) {
    const c10::Storage& now = saved.slot->storage;
    if (saved.is_result && !saved.slot->in_use()) continue;
    if (!now || !now.is_alias_of(saved.storage) || now.data() != saved.memory || now.nbytes() != saved.bytes)
      return false;
  }
  graph.changes_seen = storages_.graph_storage_changes();
  return true;
}

// Runs the graph under a capture. The captured graph keeps a memory pool, all of which counts towards the
// quota; the results in it count twice.
void Graphs::capture(Graph& graph) {
  graph.captures++;
  FailurePtr failure;
  CapturedGraph captured;
  try {
    add_captured_storages(graph, graph.inputs, /*are_results=*/false);
    capture_->begin();
    failure = run_captured(captured, graph);
  } catch (const std::exception&) {
    failure = current_failure("", ops_.count());
  }
  if (failure) {
    graph.why_not_captured = format_reason(*failure);
    graph.captured_storages.clear();
    return;
  }
  add_captured_storages(graph, graph.results, /*are_results=*/true);
  storages_.add_bytes(static_cast<int64_t>(captured.pool_bytes));
  graph.captured = std::move(captured);
  graph.changes_seen = storages_.graph_storage_changes();
}

FailurePtr Graphs::run_captured(CapturedGraph& captured, Graph& graph) {
  FailurePtr failure;
  try {
    failure = run(graph);
  } catch (const AcceleratorFailed& error) {
    // Work that synchronizes cannot be captured; the accelerator is not affected.
    if (!capture_->abort()) throw;
    ops_.reset();
    free_created(graph);
    return std::make_shared<Failure>(Failure{"", "", ops_.count(), error.what()});
  } catch (...) {
    capture_->abort();
    throw;
  }
  if (failure) {
    if (!capture_->abort()) throw AcceleratorFailed(failure->message);
    return failure;
  }
  captured = capture_->end();
  storages_.check_quota(captured.pool_bytes);
  return nullptr;
}

// After an incomplete run: frees what later steps would have freed.
void Graphs::free_created(const Graph& graph) {
  for (uint32_t number : graph.created)
    if (storages_.at(number).in_use()) storages_.free(number);
}

void Graphs::free(uint32_t number) {
  Graph& graph = get(number);
  release_capture(graph);
  for (uint32_t input : graph.inputs) storages_.at(input).graph_uses--;
  for (uint32_t result : graph.results) {
    storages_.at(result).graph_uses--;
    auto owner = owners_.find(result);
    if (owner != owners_.end() && owner->second == &graph) owners_.erase(owner);
  }
  bytes_ -= graph.bytes;
  graphs_.erase(number);
}

void Graphs::clear() {
  recording_.reset();
  owners_.clear();
  for (auto& [_, graph] : graphs_) release_capture(*graph);
  graphs_.clear();
  bytes_ = 0;
}

}  // namespace genie
