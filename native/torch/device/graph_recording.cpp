// Records graphs on the executor, and replays and frees them. See connection.h.
#include "connection.h"
#include "errors.h"

namespace genie {

void Connection::check_not_recording(const char* operation) const {
  if (is_recording_thread()) {
    raise_python_error("device.op_refused", std::string(operation) + " cannot be part of a captured graph");
  }
}

void Connection::track_storage_access_in_graph(uint32_t storage, const c10::Storage& c10_storage,
                                               bool is_written) {
  if (!is_recording_thread()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  graphs_.track_access(storage, c10_storage, is_written);
}

StorageAccess Connection::storage_access_in_graph(uint32_t graph, uint32_t storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return graphs_.access(graph, storage);
}

size_t Connection::graph_written_storage_count(uint32_t graph) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return graphs_.written_storage_count(graph);
}

bool Connection::is_created_by_recording(uint32_t storage) const {
  if (!is_recording_thread()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return graphs_.is_created_by_recording(storage);
}

uint32_t Connection::begin_graph(const std::string& thread_name, double recording_thread_idle_s_max) {
  check_not_recording("another graph");
  LockedRecordWriter writer(*this);
  if (!graphs_.has_number_left()) {
    raise_python_error("device.op_refused",
                       options_.device_name + ": limit of " + std::to_string(GRAPHS_MAX) + " graphs reached");
  }
  uint32_t graph = graphs_.begin(thread_name, recording_thread_idle_s_max);
  writer.records().begin_record(RecordKind::GraphBegin);
  writer.records().write_u32(graph);
  writer.finish_record();
  return graph;
}

void Connection::end_graph(uint32_t action) {
  GraphRecorder::EndedRecording ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!graphs_.is_recording()) return;
    frames_.records().begin_record(RecordKind::GraphEnd, action);
    ended = graphs_.end();
    for (uint32_t generator : ended.generators_to_free) write_free_generator(generator);
    bind_and_free_unbound_outputs();
    if (is_sender_thread_asleep_) wake_sender_thread();
    state_changed_.notify_all();
  }
  if (action == GRAPH_DISCARD) release_graph_numbers_and_storages(ended.graph);
  for (uint32_t graph : ended.graphs_to_free) free_graph(graph);
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
  if (graphs_.is_recording() || !graphs_.is_created_by_graph(result_storage)) {
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
    if (graphs_.is_recording()) return graphs_.free_graph_after_recording(graph);
    if (!is_session_lost_) {
      frames_.records().begin_record(RecordKind::GraphFree);
      frames_.records().write_u32(graph);
      frames_.count_record();
    }
  }
  release_graph_numbers_and_storages(graph);
}

// Frees its numbers, and then, without the lock, the storages that it kept alive.
void Connection::release_graph_numbers_and_storages(uint32_t graph_number) {
  std::unique_ptr<GraphRecorder::GraphStorages> removed;
  std::lock_guard<std::mutex> lock(mutex_);
  removed = graphs_.remove(graph_number);
  if (removed) storage_numbers_.free(removed->freed_created);
}

}  // namespace genie
