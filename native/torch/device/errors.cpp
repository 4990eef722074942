// See errors.h.
#include "errors.h"

#include <unordered_map>

#include <pybind11/pybind11.h>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

namespace genie {

namespace {

std::unordered_map<std::string, PyObject*>& classes() {
  static auto* all = new std::unordered_map<std::string, PyObject*>();
  return *all;
}

// What an executor says may be anything; Python takes only proper text.
std::string printable(const std::string& text) {
  std::string shown = text;
  for (char& each : shown)
    if (static_cast<unsigned char>(each) >= 0x80) each = '?';
  return shown;
}

// torch turns it into the Python class when the call returns to Python.
struct PythonFailure final : torch::PyTorchError {
  PythonFailure(std::string code, std::string message)
      : torch::PyTorchError(std::move(message)), code(std::move(code)) {}

  // Runs no Python: a signal may be pending.
  PyObject* python_type() override {
    std::string nearest = code;
    for (;;) {
      auto found = classes().find(nearest);
      if (found != classes().end()) return found->second;
      size_t dot = nearest.rfind('.');
      if (dot == std::string::npos) return PyExc_RuntimeError;
      nearest.resize(dot);
    }
  }

  std::string code;
};

template <class Error>
[[noreturn]] void raise_torch(const std::string& message) {
  throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace

void set_error_class(const std::string& code, void* python_class) {
  auto* kept = static_cast<PyObject*>(python_class);
  Py_INCREF(kept);
  classes()[code] = kept;
}

void raise(const std::string& code, const std::string& message) { throw PythonFailure(code, message); }

void raise_remote(const std::string& code, const std::string& op, uint64_t number, const std::string& message,
                  const std::string& device_name) {
  std::string text = printable(message);
  if (!op.empty())
    text += " [" + printable(op) + ", op " + std::to_string(number) + " on " + device_name + "]";
  if (code == "device.out_of_memory") raise_torch<c10::OutOfMemoryError>(text);
  if (code == "remote.IndexError") raise_torch<c10::IndexError>(text);
  if (code == "remote.ValueError") raise_torch<c10::ValueError>(text);
  if (code == "remote.TypeError") raise_torch<c10::TypeError>(text);
  if (code == "remote.NotImplementedError") raise_torch<c10::NotImplementedError>(text);
  if (code == "remote.LinAlgError") raise_torch<c10::LinAlgError>(text);
  raise(code, text);
}

}  // namespace genie
