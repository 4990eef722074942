// The graphs of a connection: which thread records one, and which storages each graph creates, reads and
// writes. The mutex of the connection guards it, except where it is marked as thread-safe. Writes no records
// (graph_recording.cpp).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/core/Storage.h>

#include "number_pool.h"
#include "../wire.h"

namespace genie {

// How a graph accesses a storage that it did not create.
enum class StorageAccess : uint8_t { Unused, Read, Written };

class GraphRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  // Thread-safe.
  bool is_recording() const { return is_recording_.load(std::memory_order_acquire); }
  // Whether this thread is recording. Thread-safe.
  bool is_recording_thread() const {
    return is_recording() && thread_id_.load() == std::this_thread::get_id();
  }

  bool has_number_left() const { return numbers_.unassigned_count() > 0; }
  // This thread, named `thread_name`, records the graph whose number is returned. Only if has_number_left().
  uint32_t begin(const std::string& thread_name, double idle_s_max);
  struct EndedRecording {
    uint32_t graph;
    std::vector<uint32_t> graphs_to_free, generators_to_free;  // see free_after_recording
  };
  // Only if is_recording().
  EndedRecording end();
  // What cannot be freed within the recording.
  void free_graph_after_recording(uint32_t graph) { graphs_to_free_.push_back(graph); }
  void free_generator_after_recording(uint32_t generator) { generators_to_free_.push_back(generator); }

  const std::string& thread_name() const { return thread_name_; }
  double idle_s_max() const { return idle_s_max_; }
  // The recording thread uses the connection.
  void update_last_used_time(Clock::time_point now) { last_used_at_ = now; }
  // Whether the recording thread has not used the connection for `idle_s_max`, since `since` at least.
  bool is_idle(Clock::time_point since) const;

  // Storages. While recording, each new one belongs to the graph, and its number is kept for the graph.
  void add_created_storage(uint32_t storage) {
    if (recording_) graph_of_created_storage_[storage] = recording_;
  }
  // Whether a graph keeps the number of the storage, which has been freed.
  bool keeps_number_of_freed_storage(uint32_t storage);
  bool is_created_by_graph(uint32_t storage) const { return graph_of_created_storage_.contains(storage); }
  bool is_created_by_recording(uint32_t storage) const;
  // An op of the recording thread uses the storage.
  void track_access(uint32_t storage, const c10::Storage& c10_storage, bool is_written);
  StorageAccess access(uint32_t graph, uint32_t storage) const;
  size_t written_storage_count(uint32_t graph) const;

  struct GraphStorages {
    std::vector<uint32_t> freed_created;                     // created in it and freed since
    std::unordered_map<uint32_t, c10::Storage> preexisting;  // kept alive
    std::unordered_set<uint32_t> written_preexisting;        // of those, the ones it writes to
  };
  // Removes the graph, if it exists. Destroy what it returns without the mutex: freeing storages takes it.
  std::unique_ptr<GraphStorages> remove(uint32_t graph);

 private:
  NumberPool numbers_{0, GRAPHS_MAX};
  std::unordered_map<uint32_t, std::unique_ptr<GraphStorages>> storages_by_graph_;
  std::unordered_map<uint32_t, GraphStorages*> graph_of_created_storage_;
  GraphStorages* recording_ = nullptr;  // one of storages_by_graph_
  uint32_t recording_number_ = 0;
  std::vector<uint32_t> graphs_to_free_, generators_to_free_;
  std::atomic<bool> is_recording_{false};
  std::atomic<std::thread::id> thread_id_;
  std::atomic<Clock::time_point> last_used_at_;
  std::string thread_name_;
  double idle_s_max_ = 0;
};

}  // namespace genie
