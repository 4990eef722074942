// Maps device indices to connections, and holds the current index of each thread.
// Does not find executors: it calls genie/device/registry.py to open a connection.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include <ATen/core/Generator.h>

#include "connection.h"

namespace genie {

// Opens the connection of an index; may raise. Called without locks held.
using OpenConnectionFunction = std::function<ConnectionPtr(int index)>;

class DeviceRegistry {
 public:
  // Called again with a higher count, it adds indices; existing ones do not change.
  void attach_devices(int count, OpenConnectionFunction open);
  // Tensors keep their connections; indices are invalid until the next attach.
  void detach_devices();

  int device_count() const { return device_count_.load(std::memory_order_acquire); }
  int current_device() const;
  void set_current_device(int index);  // raises for an unknown index
  void set_current_device_unchecked(int index) noexcept;

  // Opens the connection at the first use, and again after a loss. Negative: the current index.
  ConnectionPtr get_or_open_connection(int index);
  // Null if there is none, or it is lost.
  ConnectionPtr find_open_connection(int index);
  const at::Generator& default_generator(int index);

 private:
  void check_device_index(int index);

  std::mutex mutex_;
  std::atomic<int> device_count_{0};
  OpenConnectionFunction open_connection_function_;
  std::vector<ConnectionPtr> connections_;
  std::deque<at::Generator> default_generators_;  // by index; references stay valid
};

DeviceRegistry& device_registry();

}  // namespace genie
