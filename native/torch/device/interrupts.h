// Blocking waits in a Python process: they release the GIL and handle signals (Ctrl-C).
#pragma once

#include <chrono>
#include <string>

struct _ts;  // PyThreadState; Python's header stays out of most files

namespace genie {

// Releases the GIL while this thread waits, if it holds it.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  _ts* saved_thread_state_ = nullptr;
};

// Remembers Python's main thread, the only one that runs signal handlers. Call with the GIL.
void store_python_main_thread_id();

// How often a wait checks for signals.
constexpr auto SIGNAL_CHECK_INTERVAL = std::chrono::milliseconds(200);

// Call between two slices of a wait, without locks: runs pending signal handlers, which may use the device,
// and throws what they raise. Does nothing except on Python's main thread.
void run_pending_signal_handlers();

// Python's name of this thread. Takes the GIL.
std::string python_thread_name();

}  // namespace genie
