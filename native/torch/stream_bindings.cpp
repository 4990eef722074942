#include "stream_bindings.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "stream_openssl.h"
#include "stream_socket.h"

namespace py = pybind11;

namespace genie {

namespace {

constexpr int64_t SIGNAL_CHECK_INTERVAL_US = 200'000;

// The Python object. close() releases the stream; a thread that is still in a call keeps it until it returns.
struct StreamObject {
  std::shared_ptr<Stream> stream;

  std::shared_ptr<Stream> get_open_stream() const {
    if (!stream) throw ConnectionLost("the connection is closed");
    return stream;
  }
};

// The buffer of a Python object: bytes, bytearray, memoryview, an array.
class PythonBuffer {
 public:
  explicit PythonBuffer(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  ~PythonBuffer() { PyBuffer_Release(&view_); }
  PythonBuffer(const PythonBuffer&) = delete;
  PythonBuffer& operator=(const PythonBuffer&) = delete;

  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

int64_t to_microseconds(std::optional<double> timeout_s) {
  constexpr double YEAR_S = 365.0 * 86400;
  if (!timeout_s || *timeout_s > YEAR_S) return -1;
  if (!(*timeout_s >= 0)) throw py::value_error("timeout_s must be a number >= 0, or None");
  return static_cast<int64_t>(*timeout_s * 1e6);
}

template <class Work>
auto without_gil(Work work) {
  py::gil_scoped_release release;
  return work();
}

StreamObject plaintext(int fd) { return {Stream::plaintext(fd)}; }

StreamObject tls_client(int fd, const std::vector<py::bytes>& ca_der, const std::string& server_name,
                        std::optional<double> timeout_s) {
  std::vector<std::string> certificates(ca_der.begin(), ca_der.end());
  int64_t timeout_us = to_microseconds(timeout_s);
  return without_gil(
      [&] { return StreamObject{Stream::tls_client(fd, certificates, server_name, timeout_us)}; });
}

StreamObject tls_server(int fd, const std::string& certificate_path, const std::string& key_path,
                        std::optional<double> timeout_s) {
  int64_t timeout_us = to_microseconds(timeout_s);
  return without_gil(
      [&] { return StreamObject{Stream::tls_server(fd, certificate_path, key_path, timeout_us)}; });
}

py::bytes read_exactly(const StreamObject& self, size_t count, std::optional<double> timeout_s) {
  auto stream = self.get_open_stream();
  int64_t timeout_us = to_microseconds(timeout_s);
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count));
  if (!made) throw py::error_already_set();
  auto bytes = py::reinterpret_steal<py::bytes>(made);
  char* into = PyBytes_AS_STRING(bytes.ptr());
  Deadline deadline(timeout_us);
  for (size_t got = 0; got < count;) {
    int64_t remaining_us = deadline.remaining_us();
    int64_t slice_us =
        remaining_us < 0 ? SIGNAL_CHECK_INTERVAL_US : std::min(remaining_us, SIGNAL_CHECK_INTERVAL_US);
    size_t some = without_gil([&] { return stream->read_some(into + got, count - got, slice_us); });
    if (some == 0 && remaining_us == 0) {
      throw ConnectionLost("timeout: the peer sent " + std::to_string(got) + " of " + std::to_string(count) +
                           " bytes");
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    got += some;
  }
  return bytes;
}

void write_all(const StreamObject& self, const py::object& data, std::optional<double> timeout_s) {
  auto stream = self.get_open_stream();
  int64_t timeout_us = to_microseconds(timeout_s);
  PythonBuffer memory(data);
  without_gil([&] { stream->write_all(memory.data(), memory.size(), timeout_us); });
}

StreamObject downgrade_to_plaintext(StreamObject& self, std::optional<double> timeout_s) {
  auto stream = self.get_open_stream();
  int64_t timeout_us = to_microseconds(timeout_s);
  auto without = without_gil([&] { return StreamObject{stream->downgrade_to_plaintext(timeout_us)}; });
  self.stream.reset();
  return without;
}

void shut_down(const StreamObject& self) {
  if (self.stream) self.stream->shut_down();
}

void close(StreamObject& self) {
  shut_down(self);
  self.stream.reset();
}

// Python's ssl module may be missing; OpenSSL is then searched by its usual names.
void set_openssl_library_of_python() {
  try {
    openssl::set_openssl_library(py::module_::import("_ssl").attr("__file__").cast<std::string>());
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError) && !error.matches(PyExc_AttributeError)) throw;
  }
}

}  // namespace

void bind_stream(py::module_& module) {
  set_openssl_library_of_python();
  py::register_local_exception<ConnectionLost>(module, "ConnectionLost", PyExc_ConnectionError);
  py::register_local_exception<TlsHandshakeFailed>(module, "TlsHandshakeFailed", PyExc_ConnectionError);
  py::class_<StreamObject>(module, "Stream", py::module_local())
      .def_static("plaintext", &plaintext, py::arg("fd"))
      .def_static("tls_client", &tls_client, py::arg("fd"), py::arg("ca_der"), py::arg("server_name"),
                  py::arg("timeout_s"))
      .def_static("tls_server", &tls_server, py::arg("fd"), py::arg("certificate_path"), py::arg("key_path"),
                  py::arg("timeout_s"))
      .def("read_exactly", &read_exactly, py::arg("count"), py::arg("timeout_s"))
      .def("write_all", &write_all, py::arg("data"), py::arg("timeout_s"))
      .def("downgrade_to_plaintext", &downgrade_to_plaintext, py::arg("timeout_s"))
      .def("shut_down", &shut_down)
      .def("close", &close)
      .def_property_readonly("is_encrypted",
                             [](const StreamObject& self) { return self.get_open_stream()->is_encrypted(); });
}

std::shared_ptr<Stream> stream_from_python(py::handle object) {
  return object.cast<const StreamObject&>().get_open_stream();
}

}  // namespace genie
