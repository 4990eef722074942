// Python's lock, around waits.
#pragma once

#include <pybind11/pybind11.h>

namespace genie {

// The interpreter goes on while this thread waits, if this thread holds it.
class LetInterpreterGo {
 public:
  LetInterpreterGo() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~LetInterpreterGo() {
    if (state_) PyEval_RestoreThread(state_);
  }
  LetInterpreterGo(const LetInterpreterGo&) = delete;
  LetInterpreterGo& operator=(const LetInterpreterGo&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace genie
