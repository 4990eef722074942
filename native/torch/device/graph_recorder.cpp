// See graph_recorder.h.
#include "graph_recorder.h"

#include <algorithm>
#include <utility>

namespace genie {

uint32_t GraphRecorder::begin(const std::string& thread_name, double idle_s_max) {
  recording_number_ = numbers_.assign();
  auto& made = storages_by_graph_[recording_number_] = std::make_unique<GraphStorages>();
  recording_ = made.get();
  thread_id_ = std::this_thread::get_id();
  last_used_at_ = Clock::now();
  thread_name_ = thread_name;
  idle_s_max_ = idle_s_max;
  is_recording_ = true;
  return recording_number_;
}

GraphRecorder::EndedRecording GraphRecorder::end() {
  recording_ = nullptr;
  is_recording_ = false;
  return {recording_number_, std::exchange(graphs_to_free_, {}), std::exchange(generators_to_free_, {})};
}

bool GraphRecorder::is_idle(Clock::time_point since) const {
  std::chrono::duration<double> idle = Clock::now() - std::max(since, last_used_at_.load());
  return idle.count() > idle_s_max_;
}

// --- storages -----------------------------------------------------------------------------------

bool GraphRecorder::keeps_number_of_freed_storage(uint32_t storage) {
  if (graph_of_created_storage_.empty()) return false;
  auto graph = graph_of_created_storage_.find(storage);
  if (graph == graph_of_created_storage_.end()) return false;
  graph->second->freed_created.push_back(storage);
  return true;
}

bool GraphRecorder::is_created_by_recording(uint32_t storage) const {
  auto graph = graph_of_created_storage_.find(storage);
  return graph != graph_of_created_storage_.end() && graph->second == recording_;
}

void GraphRecorder::track_access(uint32_t storage, const c10::Storage& c10_storage, bool is_written) {
  if (!recording_ || is_created_by_recording(storage)) return;
  recording_->preexisting.emplace(storage, c10_storage);
  if (is_written) recording_->written_preexisting.insert(storage);
}

StorageAccess GraphRecorder::access(uint32_t graph, uint32_t storage) const {
  auto found = storages_by_graph_.find(graph);
  if (found == storages_by_graph_.end() || !found->second->preexisting.contains(storage))
    return StorageAccess::Unused;
  return found->second->written_preexisting.contains(storage) ? StorageAccess::Written : StorageAccess::Read;
}

size_t GraphRecorder::written_storage_count(uint32_t graph) const {
  auto found = storages_by_graph_.find(graph);
  return found == storages_by_graph_.end() ? 0 : found->second->written_preexisting.size();
}

std::unique_ptr<GraphRecorder::GraphStorages> GraphRecorder::remove(uint32_t graph) {
  auto found = storages_by_graph_.find(graph);
  if (found == storages_by_graph_.end()) return nullptr;
  std::unique_ptr<GraphStorages> removed = std::move(found->second);
  storages_by_graph_.erase(found);
  std::erase_if(graph_of_created_storage_, [&](const auto& each) { return each.second == removed.get(); });
  numbers_.free(graph);
  return removed;
}

}  // namespace genie
