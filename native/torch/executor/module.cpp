// Python bindings of the executor library.
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../stream_bindings.h"
#include "python_compiler.h"
#include "session.h"

namespace py = pybind11;

namespace genie {

namespace {

const char* outcome_name(ConnectionOutcome outcome) {
  switch (outcome) {
    case ConnectionOutcome::Closed:
      return "closed";
    case ConnectionOutcome::Lost:
      return "lost";
    default:
      return "fatal";
  }
}

// Captures CUDA graphs through a Python object with begin(), end(), abort() and replay(graph);
// end() returns the graph and the size of its memory pool.
class PythonGraphCapture final : public GraphCapture {
 public:
  explicit PythonGraphCapture(py::object object) : object_(std::move(object)) {}
  ~PythonGraphCapture() override {
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }

  void begin() override {
    py::gil_scoped_acquire gil;
    object_.attr("begin")();
  }
  CapturedGraph end() override {
    py::gil_scoped_acquire gil;
    auto [graph, bytes] = object_.attr("end")().cast<std::pair<py::object, uint64_t>>();
    CapturedGraph captured;
    captured.pool_bytes = bytes;
    captured.graph = {graph.release().ptr(), [](void* held) {
                        py::gil_scoped_acquire gil;
                        Py_DECREF(static_cast<PyObject*>(held));
                      }};
    return captured;
  }
  bool try_abort() noexcept override {
    try {
      py::gil_scoped_acquire gil;
      object_.attr("abort")();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  void replay(void* captured_graph) override {
    py::gil_scoped_acquire gil;
    try {
      object_.attr("replay")(py::handle(static_cast<PyObject*>(captured_graph)));
    } catch (const py::error_already_set& error) {
      throw_python_error(error);
    }
  }

 private:
  py::object object_;
};

bool is_attribute_true(py::handle object, const char* name) {
  return py::hasattr(object, name) && object.attr(name).cast<bool>();
}

// Wraps a Python function of (host, port, server_name, number, token) that connects to another executor. It
// returns a stream or raises a GenieError.
ParcelConnector make_parcel_connector(py::object callable) {
  if (callable.is_none()) return {};
  std::shared_ptr<py::object> kept(new py::object(std::move(callable)), [](py::object* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
  return [kept](const ParcelOrigin& origin) {
    py::gil_scoped_acquire gil;
    try {
      return stream_from_python(
          (*kept)(origin.host, origin.port, origin.server_name, origin.number, origin.token));
    } catch (const py::error_already_set& error) {
      py::object value = error.value();
      std::string code = "device.remote_op";
      if (py::hasattr(value, "code")) code = py::str(value.attr("code")).cast<std::string>();
      throw ParcelConnectError(code, py::str(value).cast<std::string>(),
                               is_attribute_true(value, "retryable"));
    }
  };
}

bool send_parcel_until_acknowledged(Session& session, uint64_t parcel_number, py::handle stream) {
  auto connection = stream_from_python(stream);
  py::gil_scoped_release release;
  return session.send_parcel_until_acknowledged(parcel_number, connection);
}

std::unique_ptr<Session> make_session(const std::string& device, uint64_t memory_quota_bytes,
                                      std::vector<std::string> allowed_ops, int64_t spin_us,
                                      py::object capture, py::object compiler,
                                      py::object connect_for_parcel) {
  std::shared_ptr<GraphCapture> capture_object;
  if (!capture.is_none()) capture_object = std::make_shared<PythonGraphCapture>(std::move(capture));
  std::shared_ptr<GraphCompiler> compiler_object;
  if (!compiler.is_none()) compiler_object = make_python_compiler(std::move(compiler));
  return std::make_unique<Session>(device, memory_quota_bytes, std::move(allowed_ops), spin_us,
                                   std::move(capture_object), std::move(compiler_object),
                                   make_parcel_connector(std::move(connect_for_parcel)));
}

std::string serve(Session& session, py::handle stream, uint64_t replies_received) {
  auto connection = stream_from_python(stream);
  py::gil_scoped_release release;
  return outcome_name(session.serve(std::move(connection), replies_received));
}

py::dict session_stats_dict(const Session& session) {
  SessionStats now = session.stats();
  py::dict result;
  result["storages"] = now.storages;
  result["bytes_allocated"] = now.bytes_allocated;
  result["bytes_allocated_peak"] = now.bytes_allocated_peak;
  result["bytes_max"] = now.bytes_max;
  result["ops"] = now.ops;
  result["frames_received"] = now.frames_received;
  result["parcels"] = now.parcels;
  result["pending_fetches"] = now.pending_fetches;
  return result;
}

}  // namespace

}  // namespace genie

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using genie::Session;
  genie::bind_stream(module);
  py::class_<Session>(module, "Session", py::module_local())
      .def(py::init(&genie::make_session), py::arg("device"), py::arg("bytes_max"), py::arg("allowed_ops"),
           py::arg("spin_us") = 0, py::arg("capture") = py::none(), py::arg("compiler") = py::none(),
           py::arg("connect") = py::none())
      .def("serve", &genie::serve, py::arg("stream"), py::arg("replies_received"))
      .def("send_parcel_until_acknowledged", &genie::send_parcel_until_acknowledged, py::arg("number"),
           py::arg("stream"))
      .def("stats", &genie::session_stats_dict)
      .def("close", &Session::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("frames_received", &Session::frames_received);
}
