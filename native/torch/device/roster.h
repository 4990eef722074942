// Which connection is behind which device index, and the current index of each thread.
// Not for: finding executors (genie/device/roster.py, which is asked to open one).
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include <ATen/core/Generator.h>

#include "connection.h"

namespace genie {

// Opens the executor of an index and connects to it; may raise. Called without locks held.
using Open = std::function<ConnectionPtr(int index)>;

class Roster {
 public:
  // Again without a detach, with a higher count: more indices, and those that were there stay as they are.
  void attach(int count, Open open);
  // Connections stay with the tensors that use them; indices stand for nothing until the next attach.
  void detach();

  int count() const { return count_.load(std::memory_order_acquire); }
  int current() const;
  void set_current(int index);  // raises for an index that is not there
  void set_current_unchecked(int index) noexcept;

  // Opens it at its first use, and again when it was lost. Negative: the current one.
  ConnectionPtr connection(int index);
  // Null when there is none yet or it is lost.
  ConnectionPtr open_connection(int index);
  const at::Generator& default_generator(int index);

 private:
  void check(int index);

  std::mutex mutex_;
  std::atomic<int> count_{0};
  Open open_;
  std::vector<ConnectionPtr> connections_;
  std::deque<at::Generator> generators_;  // by index; grows, never moves
};

Roster& roster();

}  // namespace genie
