// See interrupts.h.
#include "interrupts.h"

#include <atomic>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace genie {

namespace {

std::atomic<unsigned long> python_main_thread_id{0};

}  // namespace

GilRelease::GilRelease() {
  if (Py_IsInitialized() && PyGILState_Check()) saved_thread_state_ = PyEval_SaveThread();
}

GilRelease::~GilRelease() {
  if (saved_thread_state_) PyEval_RestoreThread(saved_thread_state_);
}

void store_python_main_thread_id() {
  python_main_thread_id =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
}

void run_pending_signal_handlers() {
  if (!Py_IsInitialized() || PyThread_get_thread_ident() != python_main_thread_id) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::string python_thread_name() {
  py::gil_scoped_acquire gil;
  return py::module_::import("threading").attr("current_thread")().attr("name").cast<std::string>();
}

}  // namespace genie
