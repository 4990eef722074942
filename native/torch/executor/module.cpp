// The executor's library as Python sees it.
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

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::Goodbye:
      return "goodbye";
    case Outcome::Lost:
      return "lost";
    default:
      return "fatal";
  }
}

// torch.cuda's graphs, by way of an object with begin(), end(), abandon() and replay(graph);
// end() gives the graph and the bytes that it keeps.
class PythonCapture final : public Capture {
 public:
  explicit PythonCapture(py::object object) : object_(std::move(object)) {}
  ~PythonCapture() override {
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }

  void begin() override {
    py::gil_scoped_acquire gil;
    object_.attr("begin")();
  }
  TakenDown end() override {
    py::gil_scoped_acquire gil;
    auto [graph, bytes] = object_.attr("end")().cast<std::pair<py::object, uint64_t>>();
    TakenDown taken;
    taken.bytes = bytes;
    taken.work = {graph.release().ptr(), [](void* held) {
                    py::gil_scoped_acquire gil;
                    Py_DECREF(static_cast<PyObject*>(held));
                  }};
    return taken;
  }
  bool abandon() noexcept override {
    try {
      py::gil_scoped_acquire gil;
      object_.attr("abandon")();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  void replay(void* work) override {
    py::gil_scoped_acquire gil;
    try {
      object_.attr("replay")(py::handle(static_cast<PyObject*>(work)));
    } catch (const py::error_already_set& error) {
      raise_from_python(error);
    }
  }

 private:
  py::object object_;
};

bool is_true(py::handle object, const char* name) {
  return py::hasattr(object, name) && object.attr(name).cast<bool>();
}

// How to connect to another executor, by way of a function of (host, port, server_name, number, token) that
// gives a stream or raises one of Genie's errors.
Fetch fetch_with(py::object callable) {
  if (callable.is_none()) return {};
  std::shared_ptr<py::object> kept(new py::object(std::move(callable)), [](py::object* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
  return [kept](const Origin& origin) {
    py::gil_scoped_acquire gil;
    try {
      return stream_of((*kept)(origin.host, origin.port, origin.server_name, origin.number, origin.token));
    } catch (const py::error_already_set& error) {
      py::object value = error.value();
      std::string code = "device.remote_op";
      if (py::hasattr(value, "code")) code = py::str(value.attr("code")).cast<std::string>();
      throw FetchRefused(code, py::str(value).cast<std::string>(), is_true(value, "retryable"));
    }
  };
}

bool deliver(Session& session, uint64_t number, py::handle stream) {
  auto connection = stream_of(stream);
  py::gil_scoped_release release;
  return session.deliver(number, connection);
}

std::unique_ptr<Session> make_session(const std::string& device, uint64_t bytes_max,
                                      std::vector<std::string> allowed_ops, int64_t spin_us,
                                      py::object capture, py::object compiler, py::object fetch) {
  std::shared_ptr<Capture> capturing;
  if (!capture.is_none()) capturing = std::make_shared<PythonCapture>(std::move(capture));
  std::shared_ptr<Compiler> compiling;
  if (!compiler.is_none()) compiling = python_compiler(std::move(compiler));
  return std::make_unique<Session>(device, bytes_max, std::move(allowed_ops), spin_us, std::move(capturing),
                                   std::move(compiling), fetch_with(std::move(fetch)));
}

std::string serve(Session& session, py::handle stream, uint64_t replies_received) {
  auto connection = stream_of(stream);
  py::gil_scoped_release release;
  return name_of(session.serve(std::move(connection), replies_received));
}

py::dict stats(const Session& session) {
  SessionStats now = session.stats();
  py::dict named;
  named["storages"] = now.storages;
  named["bytes_allocated"] = now.bytes_allocated;
  named["bytes_allocated_peak"] = now.bytes_allocated_peak;
  named["bytes_max"] = now.bytes_max;
  named["ops"] = now.ops;
  named["frames_received"] = now.frames_received;
  named["shelved"] = now.shelved;
  return named;
}

}  // namespace

}  // namespace genie

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using genie::Session;
  genie::bind_stream(module);
  py::class_<Session>(module, "Session", py::module_local())
      .def(py::init(&genie::make_session), py::arg("device"), py::arg("bytes_max"), py::arg("allowed_ops"),
           py::arg("spin_us") = 0, py::arg("capture") = py::none(), py::arg("compiler") = py::none(),
           py::arg("fetch") = py::none())
      .def("serve", &genie::serve, py::arg("stream"), py::arg("replies_received"))
      .def("deliver", &genie::deliver, py::arg("number"), py::arg("stream"))
      .def("stats", &genie::stats)
      .def("close", &Session::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("frames_received", &Session::frames_received);
}
