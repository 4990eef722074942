// Records graphs on the executor, and replays and frees them. See connection.h.
#include <algorithm>
#include <chrono>

#include "connection.h"
#include "errors.h"

namespace genie {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void Connection::check_not_recording(const char* operation) const {
  if (is_recording_thread()) {
    raise_python_error("device.op_refused", std::string(operation) + " cannot be part of a captured graph");
  }
}

void Connection::track_storage_access_in_graph(uint32_t storage, const c10::Storage& c10_storage,
                                               bool is_written) {
  if (!is_recording_thread()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_graph_) return;
  auto owner = graph_by_created_storage_.find(storage);
  if (owner != graph_by_created_storage_.end() && owner->second == recording_graph_) return;
  recording_graph_->preexisting_storages.emplace(storage, c10_storage);
  if (is_written) recording_graph_->written_preexisting_storages.insert(storage);
}

Connection::StorageAccess Connection::storage_access_in_graph(uint32_t graph, uint32_t storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graph_storages_by_number_.find(graph);
  if (found == graph_storages_by_number_.end() || !found->second->preexisting_storages.contains(storage))
    return StorageAccess::Unused;
  return found->second->written_preexisting_storages.contains(storage) ? StorageAccess::Written
                                                                       : StorageAccess::Read;
}

size_t Connection::graph_written_storage_count(uint32_t graph) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graph_storages_by_number_.find(graph);
  return found == graph_storages_by_number_.end() ? 0 : found->second->written_preexisting_storages.size();
}

bool Connection::is_created_by_recording(uint32_t storage) const {
  if (!is_recording_thread()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  auto owner = graph_by_created_storage_.find(storage);
  return owner != graph_by_created_storage_.end() && owner->second == recording_graph_;
}

uint32_t Connection::begin_graph(const std::string& thread_name, double recording_thread_idle_s_max) {
  check_not_recording("another graph");
  LockedRecordWriter writer(*this);
  if (graph_numbers_.unassigned_count() == 0) {
    raise_python_error("device.op_refused",
                       options_.device_name + ": limit of " + std::to_string(GRAPHS_MAX) + " graphs reached");
  }
  recording_graph_number_ = graph_numbers_.assign();
  auto& made = graph_storages_by_number_[recording_graph_number_] = std::make_unique<GraphStorages>();
  recording_graph_ = made.get();
  recording_thread_id_ = std::this_thread::get_id();
  recording_thread_active_at_ = Clock::now();
  recording_thread_name_ = thread_name;
  recording_thread_idle_s_max_ = recording_thread_idle_s_max;
  is_recording_ = true;
  frames_.records().begin_record(RecordKind::GraphBegin);
  frames_.records().write_u32(recording_graph_number_);
  writer.finish_record();
  return recording_graph_number_;
}

void Connection::end_graph(uint32_t action) {
  uint32_t number;
  std::vector<uint32_t> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!recording_graph_) return;
    frames_.records().begin_record(RecordKind::GraphEnd, action);
    number = recording_graph_number_;
    recording_graph_ = nullptr;
    is_recording_ = false;
    for (uint32_t generator : generators_to_free_after_recording_) write_free_generator(generator);
    generators_to_free_after_recording_.clear();
    waiting.swap(graphs_to_free_after_recording_);
    bind_and_free_unbound_outputs();
    if (is_sender_thread_asleep_) wake_sender_thread();
    state_changed_.notify_all();
  }
  if (action == GRAPH_DISCARD) release_graph_numbers_and_storages(number);
  for (uint32_t graph : waiting) free_graph(graph);
}

// Sent at once: it is much work for the executor, so batching has no benefit.
void Connection::replay_graph(uint32_t graph) {
  check_not_recording("a replay");
  LockedRecordWriter writer(*this);
  frames_.records().begin_record(RecordKind::GraphReplay);
  frames_.records().write_u32(graph);
  writer.finish_record_and_send_frame();
}

uint32_t Connection::copy_graph_result(uint32_t result_storage) {
  LockedRecordWriter writer(*this);
  auto graph = graph_by_created_storage_.find(result_storage);
  if (graph == graph_by_created_storage_.end() || recording_graph_) {
    writer.unlock();
    return 0;
  }
  uint32_t taken = writer.assign_storage_number();
  frames_.records().begin_record(RecordKind::GraphResult);
  frames_.records().write_u32(result_storage);
  frames_.records().write_u32(taken);
  writer.finish_record();
  return taken;
}

void Connection::free_graph(uint32_t graph) noexcept {
  if (is_abandoned_after_fork_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (recording_graph_) {  // not allowed within a recording
      graphs_to_free_after_recording_.push_back(graph);
      return;
    }
    if (!is_session_lost_) {
      frames_.records().begin_record(RecordKind::GraphFree);
      frames_.records().write_u32(graph);
      frames_.count_record();
    }
  }
  release_graph_numbers_and_storages(graph);
}

// Frees its numbers, and the storages it used: after the lock is released, because freeing takes the lock.
void Connection::release_graph_numbers_and_storages(uint32_t graph_number) {
  std::unique_ptr<GraphStorages> graph;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = graph_storages_by_number_.find(graph_number);
  if (found == graph_storages_by_number_.end()) return;
  graph = std::move(found->second);
  graph_storages_by_number_.erase(found);
  std::erase_if(graph_by_created_storage_, [&](const auto& each) { return each.second == graph.get(); });
  storage_numbers_.free(graph->freed_created_storages);
  graph_numbers_.free(graph_number);
}

}  // namespace genie
