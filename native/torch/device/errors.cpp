// See errors.h.
#include "errors.h"

#include <pybind11/pybind11.h>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

namespace genie {

namespace {

// torch turns it into the Python class when the call returns to Python.
struct PythonFailure final : torch::PyTorchError {
  PythonFailure(std::string code, std::string message) : torch::PyTorchError(std::move(message)), code(std::move(code)) {}

  PyObject* python_type() override {
    // Called with the GIL. The class lives as long as the module that owns it, which is for ever.
    PyObject* found = pybind11::module_::import("genie.errors").attr("class_of")(code).ptr();
    return found;
  }

  std::string code;
};

template <class Error>
[[noreturn]] void raise_torch(const std::string& message) {
  throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace

void raise(const std::string& code, const std::string& message) { throw PythonFailure(code, message); }

void raise_remote(const std::string& code, const std::string& op, uint64_t number, const std::string& message,
                  const std::string& device_name) {
  std::string text = message;
  if (!op.empty()) text += " [" + op + ", op " + std::to_string(number) + " on " + device_name + "]";
  if (code == "device.out_of_memory") raise_torch<c10::OutOfMemoryError>(text);
  if (code == "remote.IndexError") raise_torch<c10::IndexError>(text);
  if (code == "remote.ValueError") raise_torch<c10::ValueError>(text);
  if (code == "remote.TypeError") raise_torch<c10::TypeError>(text);
  if (code == "remote.NotImplementedError") raise_torch<c10::NotImplementedError>(text);
  if (code == "remote.LinAlgError") raise_torch<c10::LinAlgError>(text);
  raise(code, text);
}

}  // namespace genie
