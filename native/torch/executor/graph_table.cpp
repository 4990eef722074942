#include "graph_table.h"

#include <algorithm>

#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>

namespace genie {

namespace {

// A graph whose tensors move is captured again up to this number of times.
constexpr int CAPTURES_PER_GRAPH_MAX = 8;
constexpr size_t FAILURE_REASON_BYTES_MAX = 1000;
constexpr const char* HOST_SCALAR_REASON = "a scalar that it reads is in host memory";

uint32_t read_step_output_storage(const DecodedTemplate& op_template, const std::vector<uint8_t>& record,
                                  uint32_t output_index) {
  const uint8_t* position = record.data() + op_template.call_data_bytes + sizeof(uint32_t) * output_index;
  return read_next_value<uint32_t>(position);
}

std::string format_failure_reason(const Failure& failure) {
  std::string text = failure.op.empty() ? failure.message : failure.op + ": " + failure.message;
  if (text.size() <= FAILURE_REASON_BYTES_MAX) return text;
  text.resize(FAILURE_REASON_BYTES_MAX);
  while (!text.empty() && (text.back() & 0x80)) text.pop_back();  // no partial characters
  return text;
}

}  // namespace

// --- recording ----------------------------------------------------------------------------------

void GraphTable::begin_recording(uint32_t graph_number) {
  if (is_recording()) throw ProtocolError("a graph is already being recorded");
  if (graph_number >= GRAPHS_MAX)
    throw ProtocolError("graph " + std::to_string(graph_number) + " is out of range");
  if (graphs_.count(graph_number))
    throw ProtocolError("graph " + std::to_string(graph_number) + " already exists");
  recording_graph_ = std::make_unique<RecordedGraph>();
  recording_graph_->settings = settings_.current();
  recording_graph_number_ = graph_number;
}

void GraphTable::end_recording(uint32_t end_action) {
  if (!is_recording()) throw ProtocolError("no graph is being recorded");
  if (end_action > GRAPH_COMPILE) throw ProtocolError("a GraphEnd has an unknown mode");
  std::unique_ptr<RecordedGraph> graph = std::move(recording_graph_);
  if (end_action == GRAPH_DISCARD) {
    all_steps_bytes_ -= graph->steps_bytes;
    return;
  }
  graph->compile_pending = end_action == GRAPH_COMPILE;
  graph->has_run = true;  // the steps have just run
  for (uint32_t number : graph->input_storages) {
    StorageSlot& slot = storages_.slot_at(number);
    slot.graph_use_count++;
    graph->input_bytes.emplace_back(number, slot.bytes);
  }
  for (uint32_t number : graph->results) {
    storages_.slot_at(number).graph_use_count++;
    graph_of_result_[number] = graph.get();
  }
  graphs_.emplace(recording_graph_number_, std::move(graph));
}

void GraphTable::add_step(GraphStep step) {
  if (recording_graph_->steps.size() >= GRAPH_STEPS_MAX) throw ProtocolError("a graph has too many steps");
  // Includes the sets of storage numbers, which grow with the records.
  uint64_t bytes = sizeof step + 4 * step.record.size();
  recording_graph_->steps_bytes += bytes;
  all_steps_bytes_ += bytes;
  if (all_steps_bytes_ > GRAPH_STEPS_BYTES_MAX) throw ProtocolError("the graphs exceed the maximum size");
  recording_graph_->steps.push_back(std::move(step));
}

void GraphTable::add_created_storage(uint32_t storage) {
  storages_.slot_at(storage);  // checks the number
  // Its first read would see the contents of the previous replay.
  if (recording_graph_->input_storages.count(storage))
    throw ProtocolError("a graph creates a storage that it used before");
  recording_graph_->created_storages.insert(storage);
  recording_graph_->results.insert(storage);
}

void GraphTable::add_input_storages(const std::vector<TemplateArgument>& arguments,
                                    const uint8_t* call_data) {
  for_each_tensor_argument(arguments, call_data, [this](const TemplateArgument& argument, uint32_t number) {
    storages_.slot_at(number);  // checks the number
    if (recording_graph_->created_storages.count(number)) return;
    recording_graph_->input_storages.insert(number);
    if (argument.is_written) recording_graph_->written_inputs.insert(number);
  });
}

void GraphTable::record_op(const std::shared_ptr<DecodedTemplate>& op_template, const uint8_t* record,
                           size_t bytes) {
  GraphStep step{RecordKind::Op, op_template, {record, record + bytes}};
  add_input_storages(op_template->arguments, record);
  for (uint32_t i = 0; i < op_template->new_output_count; i++)
    add_created_storage(read_step_output_storage(*op_template, step.record, i));
  add_step(std::move(step));
  recording_graph_->has_ops = true;
}

void GraphTable::record_settings(const Settings& settings) {
  if (!recording_graph_->has_ops) {
    recording_graph_->settings = settings;
    return;
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(&settings);
  add_step({RecordKind::Settings, nullptr, {bytes, bytes + sizeof settings}});
}

void GraphTable::record_allocate(uint32_t storage, uint64_t bytes) {
  add_created_storage(storage);
  add_step({RecordKind::Allocate, nullptr, {}, storage, bytes});
}

void GraphTable::record_free(uint32_t storage) {
  // Freeing an input is not part of the graph.
  if (recording_graph_->results.erase(storage)) add_step({RecordKind::Free, nullptr, {}, storage});
}

// --- storages of graphs -------------------------------------------------------------------------

// After a capture the memory of a result belongs to the graph: every replay overwrites it.
void GraphTable::before_storage_freed(uint32_t storage_number, const StorageSlot& slot) {
  if (!slot.storage || !replies_.has_borrowed_tensors()) return;
  if (slot.graph_use_count > 0) {
    for (auto& [_, graph] : graphs_)
      if (graph->captured.graph && graph->results.count(storage_number))
        replies_.before_storage_written(slot.storage);
  }
  replies_.before_storage_freed(slot.storage, slot.bytes);
}

FailurePtr GraphTable::share_result(uint32_t result_storage, uint32_t new_storage) {
  auto owner = graph_of_result_.find(result_storage);
  if (owner == graph_of_result_.end())
    throw ProtocolError("storage " + std::to_string(result_storage) + " is not a result of a graph");
  storages_.check_number_unused(new_storage);
  StorageSlot& slot = storages_.existing_slot(result_storage);
  if (slot.failure) {
    storages_.add_poisoned_storage(new_storage, slot.failure);
    return nullptr;
  }
  RecordedGraph& graph = *owner->second;
  bool first = graph.shared_results.insert(result_storage).second;
  try {
    storages_.share_memory(new_storage, slot);
    // Two storages with the same result must be writable independently.
    if (!first) storages_.unshare_memory(storages_.existing_slot(new_storage));
  } catch (...) {
    FailurePtr failure = failure_from_current_exception("a captured graph", ops_.op_count());
    if (storages_.slot_at(new_storage).is_in_use()) storages_.free(new_storage);
    storages_.add_poisoned_storage(new_storage, failure);
    return failure;
  }
  // Without a capture the next replay allocates new results, and this storage keeps the old memory.
  if (first && graph.captured.graph) graph.storages_sharing_results.insert(new_storage);
  return nullptr;
}

void GraphTable::on_storage_freed(uint32_t storage_number) {
  if (storages_.slot_at(storage_number).graph_use_count == 0) return;
  for (auto& [_, graph] : graphs_)
    if (graph->results.count(storage_number)) graph->freed_results.insert(storage_number);
  on_storage_moved(storage_number);
}

// Captured storages do not count towards the quota, so they are released as soon as they are unusable.
void GraphTable::on_storage_moved(uint32_t storage_number) {
  if (storages_.slot_at(storage_number).graph_use_count == 0) return;
  for (auto& [_, graph] : graphs_)
    if (graph->input_storages.count(storage_number)) release_capture(*graph);
}

void GraphTable::release_capture(RecordedGraph& graph) {
  storages_.add_counted_bytes(-static_cast<int64_t>(graph.captured.pool_bytes));
  graph.captured = {};
  graph.captured_storages.clear();
}

// --- replay -------------------------------------------------------------------------------------

GraphTable::RecordedGraph& GraphTable::get_graph(uint32_t graph_number) {
  auto found = graphs_.find(graph_number);
  if (found == graphs_.end())
    throw ProtocolError("graph " + std::to_string(graph_number) + " does not exist");
  return *found->second;
}

FailurePtr GraphTable::replay(uint32_t graph_number) {
  if (is_recording()) throw ProtocolError("a graph is replayed while another is being recorded");
  RecordedGraph& graph = get_graph(graph_number);
  graph.replay_count++;
  graph.shared_results.clear();
  if (replies_.has_borrowed_tensors()) copy_replies_before_graph_writes(graph);
  if (graph.captured.graph && !is_capture_valid(graph)) release_capture(graph);
  if (!graph.captured.graph) {
    struct SettingsGuard {
      SessionSettings& settings;
      ~SettingsGuard() { settings.restore(); }
    } guard{settings_};
    apply_recorded_settings(graph);
    if (!has_valid_inputs(graph)) return run_steps(graph);
    if (graph.compile_pending) try_compile(graph);
    if (can_capture(graph)) try_capture(graph);
    if (!graph.captured.graph) return run_uncaptured(graph);
  }
  FailurePtr failure = unshare_results(graph);
  try {
    capture_->replay(graph.captured.graph.get());
    return failure;
  } catch (...) {
    return failure_from_current_exception("a captured graph", ops_.op_count());
  }
}

// A captured replay overwrites the results, so storages that share them get separate memory.
FailurePtr GraphTable::unshare_results(RecordedGraph& graph) {
  FailurePtr first;
  auto is_result = [&graph](const c10::Storage& storage) {
    for (const CapturedStorage& saved : graph.captured_storages)
      if (saved.is_result && saved.storage.is_alias_of(storage)) return true;
    return false;
  };
  for (uint32_t number : graph.storages_sharing_results) {
    StorageSlot& slot = storages_.slot_at(number);  // may have been freed or reused
    if (!slot.storage || !is_result(slot.storage)) continue;
    try {
      storages_.unshare_memory(slot);
    } catch (...) {
      FailurePtr failure = failure_from_current_exception("a captured graph", ops_.op_count());
      storages_.free_and_poison(slot, failure);
      if (!first) first = failure;
    }
  }
  graph.storages_sharing_results.clear();
  return first;
}

// If not, the steps are run, which poison each affected result.
bool GraphTable::has_valid_inputs(const RecordedGraph& graph) {
  bool valid = true;
  for (auto& [number, bytes] : graph.input_bytes) {
    const StorageSlot& slot = storages_.existing_slot(number);
    valid = !slot.failure && slot.bytes >= bytes && valid;
  }
  return valid;
}

// Unreceived replies must keep their contents. Steps ensure that; compiled and captured graphs do not.
void GraphTable::copy_replies_before_graph_writes(const RecordedGraph& graph) {
  auto keep = [this](uint32_t number) {
    const StorageSlot& slot = storages_.slot_at(number);
    if (slot.storage) replies_.before_storage_written(slot.storage);
  };
  for (uint32_t number : graph.written_inputs) keep(number);
  for (const CapturedStorage& saved : graph.captured_storages)
    if (saved.is_result) replies_.before_storage_written(saved.storage);
}

GraphReport GraphTable::report(uint32_t graph_number) {
  const RecordedGraph& graph = get_graph(graph_number);
  GraphReport result;
  result.replays = graph.replay_count;
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

// A capture contains their effect.
void GraphTable::apply_recorded_settings(const RecordedGraph& graph) {
  if (graph.settings) settings_.apply_temporarily(*graph.settings);
}

FailurePtr GraphTable::run_uncaptured(RecordedGraph& graph) {
  return graph.compiled && !reads_host_memory(graph) ? run_compiled(graph) : run_steps(graph);
}

// An op may return a scalar in host memory; compiled and captured graphs cannot read it.
bool GraphTable::reads_host_memory(const RecordedGraph& graph) {
  if (storages_.device().is_cpu()) return false;
  for (uint32_t number : graph.input_storages)
    if (storages_.existing_slot(number).storage.device() != storages_.device()) return true;
  return false;
}

void GraphTable::free_previous_result(const RecordedGraph& graph, uint32_t storage) {
  if (!graph.results.count(storage)) return;
  StorageSlot& slot = storages_.slot_at(storage);
  if (!slot.is_in_use()) return;  // freed by the client
  if (slot.storage) replies_.before_storage_freed(slot.storage, slot.bytes);
  storages_.free(storage);
}

void GraphTable::free_results_freed_by_client(const RecordedGraph& graph) {
  for (uint32_t storage : graph.freed_results) free_previous_result(graph, storage);
}

FailurePtr GraphTable::run_step(RecordedGraph& graph, GraphStep& step) {
  if (step.kind == RecordKind::Op) {
    for (uint32_t i = 0; i < step.op_template->new_output_count; i++)
      free_previous_result(graph, read_step_output_storage(*step.op_template, step.record, i));
    WireReader in(step.record.data(), step.record.size());
    return ops_.run(*step.op_template, in);
  }
  if (step.kind == RecordKind::Free) {
    storages_.free(step.storage);
    return nullptr;
  }
  if (step.kind == RecordKind::Settings) {
    WireReader in(step.record.data(), step.record.size());
    settings_.apply_temporarily(read_settings(in));
    return nullptr;
  }
  free_previous_result(graph, step.storage);
  try {
    storages_.allocate(step.storage, step.allocated_bytes);
    return nullptr;
  } catch (...) {
    FailurePtr failure = failure_from_current_exception("memory of a captured graph", ops_.op_count());
    storages_.add_poisoned_storage(step.storage, failure);
    return failure;
  }
}

FailurePtr GraphTable::run_steps(RecordedGraph& graph) {
  apply_recorded_settings(graph);
  FailurePtr first;
  for (GraphStep& step : graph.steps) {
    FailurePtr failure = run_step(graph, step);
    if (failure && !first) first = failure;
  }
  free_results_freed_by_client(graph);
  return first;
}

// --- compiled graphs ----------------------------------------------------------------------------

void GraphTable::try_compile(RecordedGraph& graph) {
  graph.compile_pending = false;
  if (!compiler_) graph.why_not_compiled = "this executor has no compiler";
  if (reads_host_memory(graph)) graph.why_not_compiled = HOST_SCALAR_REASON;
  if (!graph.why_not_compiled.empty()) return;
  std::vector<uint32_t> results;
  for (uint32_t number : graph.results)
    if (!graph.freed_results.count(number)) results.push_back(number);
  std::sort(results.begin(), results.end());
  std::unordered_map<uint32_t, uint64_t> sizes;
  for (uint32_t number : graph.input_storages) sizes.emplace(number, storages_.existing_slot(number).bytes);
  try {
    CompiledGraph compiled =
        compiler_->compile(graph.steps, results, sizes, [this] { replies_.acknowledge_frames(); });
    for (const StorageView& view : compiled.inputs) {
      auto found = sizes.find(view.storage);
      uint64_t end = static_cast<uint64_t>(view.offset) * view.meta.item_bytes + view.meta.span_bytes;
      if (found == sizes.end() || end > found->second) throw OpRefused("an input exceeds its storage");
    }
    graph.compiled = std::move(compiled);
    graph.has_run = false;
  } catch (...) {
    graph.why_not_compiled = format_failure_reason(*failure_from_current_exception("", ops_.op_count()));
  }
}

// Temporary memory is not counted, as for a single op; the memory limit of the process applies to it.
FailurePtr GraphTable::run_compiled(RecordedGraph& graph) {
  FailurePtr failure;
  try {
    std::vector<at::Tensor> inputs;
    inputs.reserve(graph.compiled->inputs.size());
    for (const StorageView& view : graph.compiled->inputs)
      inputs.push_back(storages_.get_view(storages_.existing_slot(view.storage), view.meta, view.offset));
    for (const StorageView& view : graph.compiled->results) free_previous_result(graph, view.storage);
    storages_.check_quota(graph.compiled->result_bytes);
    std::vector<at::Tensor> results = compiler_->run(graph.compiled->function.get(), inputs);
    store_results(graph, inputs, std::move(results));
    graph.has_run = true;
  } catch (...) {
    failure = failure_from_current_exception("a compiled graph", ops_.op_count());
    for (const StorageView& view : graph.compiled->results) {
      free_previous_result(graph, view.storage);
      storages_.add_poisoned_storage(view.storage, failure);
    }
  }
  free_results_freed_by_client(graph);
  return failure;
}

void GraphTable::store_results(RecordedGraph& graph, const std::vector<at::Tensor>& inputs,
                               std::vector<at::Tensor> results) {
  const std::vector<StorageView>& expected = graph.compiled->results;
  if (results.size() != expected.size())
    throw OutputMismatch("a compiled graph returned another number of results");
  std::unordered_set<const c10::StorageImpl*> used;
  for (const at::Tensor& input : inputs) used.insert(input.storage().unsafeGetStorageImpl());
  for (size_t i = 0; i < results.size(); i++) {
    at::Tensor result = copy_result_if_shared(results[i], expected[i].meta, used);
    results[i].reset();
    storages_.add_storage(expected[i].storage, std::move(result));
  }
}

// Compiled functions may return the same memory twice, an input, or other strides.
at::Tensor GraphTable::copy_result_if_shared(
    const at::Tensor& result, const TensorMeta& expected,
    std::unordered_set<const c10::StorageImpl*>& used_storages) const {
  if (!result.defined() || result.scalar_type() != expected.dtype ||
      result.sizes() != c10::IntArrayRef(expected.sizes)) {
    throw OutputMismatch("a compiled graph returned another tensor than " +
                         describe_tensor(expected.dtype, expected.sizes));
  }
  bool unshared = used_storages.insert(result.storage().unsafeGetStorageImpl()).second &&
                  storages_.is_ordinary_tensor(result) && expected.matches(result, 0) &&
                  expected.span_bytes <= result.storage().nbytes();
  if (unshared) return at::alias(result);  // without the Python object of `result`
  auto options = at::TensorOptions().dtype(expected.dtype).device(storages_.device());
  at::Tensor copy = at::empty_strided(expected.sizes, expected.strides, options);
  copy.copy_(result);
  return copy;
}

// --- captured graphs ----------------------------------------------------------------------------

bool GraphTable::can_capture(RecordedGraph& graph) {
  if (!capture_ || !graph.has_run || !graph.why_not_captured.empty()) return false;
  if (graph.capture_count >= CAPTURES_PER_GRAPH_MAX) graph.why_not_captured = "its tensors moved too often";
  if (reads_host_memory(graph)) graph.why_not_captured = HOST_SCALAR_REASON;
  return graph.why_not_captured.empty();
}

void GraphTable::add_captured_storages(RecordedGraph& graph,
                                       const std::unordered_set<uint32_t>& storage_numbers,
                                       bool are_results) {
  for (uint32_t number : storage_numbers) {
    StorageSlot& slot = storages_.slot_at(number);
    if (slot.storage)
      graph.captured_storages.push_back(
          {&slot, slot.storage, slot.storage.data(), slot.storage.nbytes(), are_results});
  }
}

// Whether all storages still have the memory that was captured.
bool GraphTable::is_capture_valid(RecordedGraph& graph) {
  if (graph.storage_changes_seen == storages_.graph_storage_change_count()) return true;
  for (const CapturedStorage& saved : graph.captured_storages) {
    const c10::Storage& now = saved.slot->storage;
    if (saved.is_result && !saved.slot->is_in_use()) continue;
    if (!now || !now.is_alias_of(saved.storage) || now.data() != saved.memory || now.nbytes() != saved.bytes)
      return false;
  }
  graph.storage_changes_seen = storages_.graph_storage_change_count();
  return true;
}

// Runs the graph under a capture. The captured graph keeps a memory pool, all of which counts towards the
// quota; the results in it count twice.
void GraphTable::try_capture(RecordedGraph& graph) {
  graph.capture_count++;
  FailurePtr failure;
  CapturedGraph captured;
  try {
    add_captured_storages(graph, graph.input_storages, /*are_results=*/false);
    capture_->begin();
    failure = run_and_capture(captured, graph);
  } catch (const std::exception&) {
    failure = failure_from_current_exception("", ops_.op_count());
  }
  if (failure) {
    graph.why_not_captured = format_failure_reason(*failure);
    graph.captured_storages.clear();
    return;
  }
  add_captured_storages(graph, graph.results, /*are_results=*/true);
  storages_.add_counted_bytes(static_cast<int64_t>(captured.pool_bytes));
  graph.captured = std::move(captured);
  graph.storage_changes_seen = storages_.graph_storage_change_count();
}

FailurePtr GraphTable::run_and_capture(CapturedGraph& captured, RecordedGraph& graph) {
  FailurePtr failure;
  try {
    failure = run_uncaptured(graph);
  } catch (const AcceleratorFailed& error) {
    // Work that synchronizes cannot be captured; the accelerator is not affected.
    if (!capture_->try_abort()) throw;
    ops_.release_current_op();
    free_created_storages(graph);
    return std::make_shared<Failure>(Failure{"", "", ops_.op_count(), error.what()});
  } catch (...) {
    capture_->try_abort();
    throw;
  }
  if (failure) {
    if (!capture_->try_abort()) throw AcceleratorFailed(failure->message);
    return failure;
  }
  captured = capture_->end();
  storages_.check_quota(captured.pool_bytes);
  return nullptr;
}

// After an incomplete run: frees what later steps would have freed.
void GraphTable::free_created_storages(const RecordedGraph& graph) {
  for (uint32_t number : graph.created_storages)
    if (storages_.slot_at(number).is_in_use()) storages_.free(number);
}

void GraphTable::free_graph(uint32_t graph_number) {
  RecordedGraph& graph = get_graph(graph_number);
  release_capture(graph);
  for (uint32_t input : graph.input_storages) storages_.slot_at(input).graph_use_count--;
  for (uint32_t result : graph.results) {
    storages_.slot_at(result).graph_use_count--;
    auto owner = graph_of_result_.find(result);
    if (owner != graph_of_result_.end() && owner->second == &graph) graph_of_result_.erase(owner);
  }
  all_steps_bytes_ -= graph.steps_bytes;
  graphs_.erase(graph_number);
}

void GraphTable::clear() {
  recording_graph_.reset();
  graph_of_result_.clear();
  for (auto& [_, graph] : graphs_) release_capture(*graph);
  graphs_.clear();
  all_steps_bytes_ = 0;
}

}  // namespace genie
