// See errors.h.
#include "errors.h"

#include <unordered_map>

#include <pybind11/pybind11.h>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

namespace genie {

namespace {

std::unordered_map<std::string, PyObject*>& python_error_classes() {
  static auto* all = new std::unordered_map<std::string, PyObject*>();
  return *all;
}

// torch converts it to the Python class when the call returns to Python.
struct PythonGenieError final : torch::PyTorchError {
  PythonGenieError(std::string code, std::string message)
      : torch::PyTorchError(std::move(message)), code(std::move(code)) {}

  // Runs no Python: a signal may be pending.
  PyObject* python_type() override {
    std::string nearest = code;
    for (;;) {
      auto found = python_error_classes().find(nearest);
      if (found != python_error_classes().end()) return found->second;
      size_t dot = nearest.rfind('.');
      if (dot == std::string::npos) return PyExc_RuntimeError;
      nearest.resize(dot);
    }
  }

  std::string code;
};

template <class Error>
[[noreturn]] void raise_torch_error(const std::string& message) {
  throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace

std::string to_ascii(const std::string& text) {
  std::string ascii = text;
  for (char& each : ascii)
    if (static_cast<unsigned char>(each) >= 0x80) each = '?';
  return ascii;
}

void register_error_class(const std::string& code, void* python_class) {
  auto* kept = static_cast<PyObject*>(python_class);
  Py_INCREF(kept);
  python_error_classes()[code] = kept;
}

void raise_python_error(const std::string& code, const std::string& message) {
  throw PythonGenieError(code, message);
}

void raise_remote_error(const RemoteError& error, const std::string& device_name) {
  const std::string& code = error.code;
  std::string text = to_ascii(error.message);
  if (!error.op.empty())
    text += " [" + to_ascii(error.op) + ", op " + std::to_string(error.number) + " on " + device_name + "]";
  if (code == error_code::OUT_OF_MEMORY) raise_torch_error<c10::OutOfMemoryError>(text);
  if (code == error_code::INDEX_ERROR) raise_torch_error<c10::IndexError>(text);
  if (code == error_code::VALUE_ERROR) raise_torch_error<c10::ValueError>(text);
  if (code == error_code::TYPE_ERROR) raise_torch_error<c10::TypeError>(text);
  if (code == error_code::NOT_IMPLEMENTED_ERROR) raise_torch_error<c10::NotImplementedError>(text);
  if (code == error_code::LINALG_ERROR) raise_torch_error<c10::LinAlgError>(text);
  raise_python_error(code, text);
}

}  // namespace genie
