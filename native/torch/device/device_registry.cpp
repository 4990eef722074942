// See device_registry.h.
#include "device_registry.h"

#include <algorithm>

#include "errors.h"
#include "generator.h"

namespace genie {

namespace {

thread_local int current_device_index = 0;

}  // namespace

DeviceRegistry& device_registry() {
  static auto* registry = new DeviceRegistry();  // never destroyed: tensors may be destroyed last
  return *registry;
}

// Replaced objects are released after the lock: that may need the GIL, whose holder may want the lock.
void DeviceRegistry::attach_devices(int count, OpenConnectionFunction open) {
  std::vector<ConnectionPtr> replaced;
  std::lock_guard<std::mutex> lock(mutex_);
  open_connection_function_.swap(open);
  replaced.swap(connections_);
  connections_.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < std::min(replaced.size(), connections_.size()); i++)
    connections_[i].swap(replaced[i]);
  while (default_generators_.size() < static_cast<size_t>(count)) {
    default_generators_.push_back(make_default_generator(static_cast<int>(default_generators_.size())));
  }
  device_count_ = count;
}

void DeviceRegistry::detach_devices() {
  std::vector<ConnectionPtr> replaced;
  OpenConnectionFunction open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    device_count_ = 0;
    replaced.swap(connections_);
    open.swap(open_connection_function_);
  }
}

int DeviceRegistry::current_device() const { return current_device_index; }

void DeviceRegistry::set_current_device(int index) {
  if (index < 0) return;
  check_device_index(index);
  current_device_index = index;
}

void DeviceRegistry::set_current_device_unchecked(int index) noexcept {
  if (index >= 0) current_device_index = index;
}

// The Python registry, if attached, raises the error.
void DeviceRegistry::check_device_index(int index) {
  if (index < device_count()) return;
  OpenConnectionFunction open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open = open_connection_function_;
  }
  if (open) {
    open(index);  // raises, unless the index was added meanwhile
    return;
  }
  raise_python_error("session.not_initialized",
                     "remote_accelerator needs a session with a cluster; call `await genie.init(...)` first");
}

ConnectionPtr DeviceRegistry::find_open_connection(int index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index < 0 || static_cast<size_t>(index) >= connections_.size()) return {};
  const ConnectionPtr& found = connections_[static_cast<size_t>(index)];
  return found && !found->is_session_lost() ? found : ConnectionPtr();
}

ConnectionPtr DeviceRegistry::get_or_open_connection(int index) {
  // torch stores an index in eight bits; larger ones arrive as negative numbers.
  if (index < -1) raise_python_error("device.unavailable", "the largest device index is 126");
  if (index < 0) index = current_device_index;
  if (ConnectionPtr found = find_open_connection(index)) return found;
  check_device_index(index);
  OpenConnectionFunction open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open = open_connection_function_;
  }
  if (!open) check_device_index(device_count());
  ConnectionPtr opened = open(index), before;
  std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<size_t>(index) < connections_.size()) {
    before = std::exchange(connections_[static_cast<size_t>(index)], opened);
  }
  return opened;
}

const at::Generator& DeviceRegistry::default_generator(int index) {
  if (index < 0) index = current_device_index;
  check_device_index(index);
  std::lock_guard<std::mutex> lock(mutex_);
  return default_generators_[static_cast<size_t>(index)];
}

}  // namespace genie
