// Waiting beside Python: the interpreter goes on meanwhile, and a signal (Ctrl-C) is heard.
#pragma once

#include <chrono>
#include <string>

struct _ts;  // PyThreadState; Python's header stays out of most files

namespace genie {

// The interpreter goes on while this thread waits, if this thread holds it.
class LetInterpreterGo {
 public:
  LetInterpreterGo();
  ~LetInterpreterGo();
  LetInterpreterGo(const LetInterpreterGo&) = delete;
  LetInterpreterGo& operator=(const LetInterpreterGo&) = delete;

 private:
  _ts* state_ = nullptr;
};

// Python runs the handlers of signals on one thread only. Called with the GIL.
void find_main_thread();

// How long a wait may go on without a look.
constexpr auto SIGNALS_EVERY = std::chrono::milliseconds(200);

// Between two slices of a wait, without any lock: runs the handlers of the signals that have come, and throws
// what they raise. They may use the device. On every other thread than Python's main one this does nothing.
void check_signals();

// What Python calls this thread. Takes the GIL.
std::string thread_name();

}  // namespace genie
