// See interrupts.h.
#include "interrupts.h"

#include <atomic>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace genie {

namespace {

std::atomic<unsigned long> main_thread{0};

}  // namespace

GilRelease::GilRelease() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

GilRelease::~GilRelease() {
  if (state_) PyEval_RestoreThread(state_);
}

void remember_main_thread() {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
}

void check_signals() {
  if (!Py_IsInitialized() || PyThread_get_thread_ident() != main_thread) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::string python_thread_name() {
  py::gil_scoped_acquire gil;
  return py::module_::import("threading").attr("current_thread")().attr("name").cast<std::string>();
}

}  // namespace genie
