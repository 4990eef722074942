// See roster.h.
#include "roster.h"

#include <algorithm>

#include "errors.h"
#include "generator.h"

namespace genie {

namespace {

thread_local int current_index = 0;

}  // namespace

Roster& roster() {
  static auto* the_roster = new Roster();  // never destroyed: tensors may die after everything else
  return *the_roster;
}

// What is replaced here is let go of without the lock: that may need the GIL, whose holder may want the lock.
void Roster::attach(int count, Open open) {
  std::vector<ConnectionPtr> left;
  std::lock_guard<std::mutex> lock(mutex_);
  open_.swap(open);
  left.swap(connections_);
  connections_.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < std::min(left.size(), connections_.size()); i++) connections_[i].swap(left[i]);
  while (generators_.size() < static_cast<size_t>(count)) {
    generators_.push_back(make_default_generator(static_cast<int>(generators_.size())));
  }
  count_ = count;
}

void Roster::detach() {
  std::vector<ConnectionPtr> left;
  Open open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count_ = 0;
    left.swap(connections_);
    open.swap(open_);
  }
}

int Roster::current() const { return current_index; }

void Roster::set_current(int index) {
  if (index < 0) return;
  check(index);
  current_index = index;
}

void Roster::set_current_unchecked(int index) noexcept {
  if (index >= 0) current_index = index;
}

// The Python roster words the errors; it is asked only when there is one.
void Roster::check(int index) {
  if (index < count()) return;
  Open open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open = open_;
  }
  if (open) {
    open(index);  // raises; or the index came up a moment ago
    return;
  }
  raise("session.not_initialized",
        "remote_accelerator needs a session with a cluster; call `await genie.init(...)` first");
}

ConnectionPtr Roster::open_connection(int index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index < 0 || static_cast<size_t>(index) >= connections_.size()) return {};
  const ConnectionPtr& found = connections_[static_cast<size_t>(index)];
  return found && !found->lost() ? found : ConnectionPtr();
}

ConnectionPtr Roster::connection(int index) {
  // torch keeps an index in eight bits, and what is too large for those comes out below zero.
  if (index < -1) raise("device.unavailable", "there is no device index beyond 126");
  if (index < 0) index = current_index;
  if (ConnectionPtr found = open_connection(index)) return found;
  check(index);
  Open open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open = open_;
  }
  if (!open) check(count());
  ConnectionPtr opened = open(index), before;
  std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<size_t>(index) < connections_.size()) {
    before = std::exchange(connections_[static_cast<size_t>(index)], opened);
  }
  return opened;
}

const at::Generator& Roster::default_generator(int index) {
  if (index < 0) index = current_index;
  check(index);
  std::lock_guard<std::mutex> lock(mutex_);
  return generators_[static_cast<size_t>(index)];
}

}  // namespace genie
