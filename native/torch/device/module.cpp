// The Python face of the device: genie/device uses it, and nobody else.
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "../stream_bindings.h"
#include "beside.h"
#include "connection.h"
#include "dispatch.h"
#include "errors.h"
#include "guard.h"
#include "roster.h"

namespace py = pybind11;

namespace genie {

namespace {

// Python callables are let go of with the GIL, on whatever thread that happens.
std::shared_ptr<py::function> kept(py::function callable) {
  return {new py::function(std::move(callable)), [](py::function* held) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

ConnectionPtr connect(py::handle stream, int index, const std::string& device_name,
                      const std::string& executor, const std::string& kind, double op_timeout_s,
                      bool blocking, uint32_t flush_ops, py::function resume) {
  ConnectionOptions options{index, device_name, executor, kind, op_timeout_s, blocking, flush_ops};
  auto callable = kept(std::move(resume));
  Resume again = [callable](uint64_t replies_received) {
    py::gil_scoped_acquire gil;
    try {
      auto [stream, frames] = (*callable)(replies_received).cast<std::pair<py::object, uint64_t>>();
      return Resumed{stream_of(stream), frames};
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(py::str(error.value()).cast<std::string>());
    }
  };
  return c10::make_intrusive<Connection>(stream_of(stream), std::move(options), std::move(again));
}

void attach(int count, py::function open) {
  auto callable = kept(std::move(open));
  roster().attach(count, [callable](int index) {
    py::gil_scoped_acquire gil;
    return (*callable)(index).cast<ConnectionPtr>();
  });
}

py::dict executor_counters(Connection& connection) {
  connection.check_not_recording("reading counters");
  Awaited awaited;
  {
    py::gil_scoped_release go;
    Connection::Batch batch(connection);
    batch.records().record(Record::Stats);
    uint64_t number = batch.finish_ask(awaited);
    connection.await(number, awaited);
  }
  Reader in(awaited.payload.data(), awaited.payload.size());
  py::dict found;
  for (const char* name : {"tensors", "bytes_allocated", "bytes_allocated_peak", "bytes_max", "ops"}) {
    found[name] = in.u64();
  }
  return found;
}

py::dict client_counters(Connection& connection) {
  ConnectionCounters now;
  {
    py::gil_scoped_release go;
    now = connection.counters();
  }
  py::dict found;
  found["ops"] = now.ops;
  found["asks"] = now.asks;
  found["misses"] = now.misses;
  found["frames"] = now.frames;
  found["bytes_sent"] = now.bytes_sent;
  found["replies"] = now.replies;
  found["resumes"] = now.resumes;
  found["templates"] = now.templates;
  found["storages"] = now.storages;
  return found;
}

// How the executor replays a graph, how often it has, and why not in a better way.
py::tuple graph_report(Connection& connection, uint32_t graph) {
  connection.check_not_recording("a report");
  Awaited awaited;
  {
    py::gil_scoped_release go;
    Connection::Batch batch(connection);
    batch.records().record(Record::GraphReport);
    batch.records().u32(graph);
    uint64_t number = batch.finish_ask(awaited);
    connection.await(number, awaited);
  }
  static const char* const HOW[] = {"steps", "cuda graph", "inductor", "inductor in a cuda graph"};
  try {
    Reader in(awaited.payload.data(), awaited.payload.size());
    uint8_t how = in.u8();
    if (how >= std::size(HOW)) throw ProtocolError("a graph is replayed in an unknown way");
    uint64_t replays = in.u64();
    return py::make_tuple(HOW[how], replays, in.text());
  } catch (const ProtocolError& error) {
    connection.fail(error);
  }
}

// Tensors whose memory a graph has been made with.
class Watch {
 public:
  explicit Watch(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const at::Tensor& tensor : tensors_) storages_.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  // Whether each still stands on the memory that it stood on.
  bool holds() const {
    for (size_t i = 0; i < tensors_.size(); i++)
      if (tensors_[i].storage().unsafeGetStorageImpl() != storages_[i]) return false;
    return true;
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<const c10::StorageImpl*> storages_;
};

void seed(Connection& connection, uint64_t value) {
  connection.check_not_recording("a seed");
  Connection::Batch batch(connection);
  batch.records().record(Record::Seed);
  batch.records().u32(0);
  batch.records().u64(value);
  batch.finish_op();
}

at::Tensor rng_state(int index) { return at::Tensor(roster().default_generator(index).get_state()); }

void set_rng_state(int index, const at::Tensor& state) {
  at::Generator generator = roster().default_generator(index);
  generator.set_state(state);
}

}  // namespace

}  // namespace genie

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace genie;
  auto without_gil = py::call_guard<py::gil_scoped_release>();
  bind_stream(m);
  py::class_<Connection, ConnectionPtr>(m, "Connection", py::module_local())
      .def(py::init(&connect), py::kw_only(), py::arg("stream"), py::arg("index"), py::arg("device_name"),
           py::arg("executor"), py::arg("kind"), py::arg("op_timeout_s"), py::arg("blocking"),
           py::arg("flush_ops"), py::arg("resume"))
      .def_property_readonly("lost", &Connection::lost)
      .def("synchronize", &Connection::synchronize, without_gil)
      .def("seed", &seed, without_gil)
      .def("executor_counters", &executor_counters)
      .def("client_counters", &client_counters)
      .def("begin_graph", &Connection::begin_graph, without_gil)
      .def("end_graph", &Connection::end_graph, without_gil)
      .def("graph_report", &graph_report)
      .def("replay_graph", &Connection::replay_graph, without_gil)
      .def("free_graph", &Connection::free_graph, without_gil)
      .def("close", &Connection::close, without_gil)
      .def("abandon", &Connection::abandon);
  py::class_<Watch>(m, "Watch", py::module_local())
      .def(py::init<std::vector<at::Tensor>>())
      .def("holds", &Watch::holds);
  for (py::handle each : py::module_::import("genie.errors").attr("all_errors")()) {
    set_error_class(each.attr("code").cast<std::string>(), each.ptr());
  }
  m.def("register", [] {
    register_hooks();
    return register_ops();
  });
  m.def("step_aside", &step_aside);
  m.def("enter_backward", &enter_backward);
  m.def("leave_backward", &leave_backward);
  m.def("reach", [](const std::vector<at::Tensor>& roots) {
    Reach found = reach_of(roots);
    return std::make_pair(found.remote, found.local);
  });
  m.def("attach", &attach);
  m.def("detach", [] { roster().detach(); });
  m.def("current_device", [] { return roster().current(); });
  m.def("set_device", [](int index) { roster().set_current(index); });
  m.def("set_device_unchecked", [](int index) { roster().set_current_unchecked(index); });
  m.def("rng_state", &rng_state, without_gil);
  m.def("set_rng_state", &set_rng_state, without_gil);
}
