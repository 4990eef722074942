// Python bindings of the device, for genie/device. Declared in genie/native/genie_device.pyi.
#include <algorithm>
#include <map>
#include <tuple>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "../stream_bindings.h"
#include "local_accelerator.h"
#include "connection.h"
#include "dispatch.h"
#include "errors.h"
#include "device_guard.h"
#include "interrupts.h"
#include "memory.h"
#include "device_registry.h"
#include "storage.h"
#include "graph_guard.h"
#include "recurrent.h"

namespace py = pybind11;

namespace genie {

namespace {

// Shares a Python callable; the last owner, on any thread, releases it with the GIL.
std::shared_ptr<py::function> make_shared_callable(py::function callable) {
  return {new py::function(std::move(callable)), [](py::function* held) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

ConnectionPtr make_connection(py::handle stream, int index, const std::string& device_name,
                              const std::string& executor_description, const std::string& accelerator_kind,
                              double op_timeout_s, bool blocking, uint32_t ops_per_frame_max,
                              const std::string& host, uint32_t port, const std::string& tls_server_name,
                              py::function resume, py::function make_fetch_token) {
  ConnectionOptions options{index,        device_name,    executor_description, accelerator_kind,
                            op_timeout_s, blocking,       ops_per_frame_max,    host,
                            port,         tls_server_name};
  auto callable = make_shared_callable(std::move(resume));
  ResumeFunction resume_callback = [callable](uint64_t replies_received) {
    py::gil_scoped_acquire gil;
    try {
      auto [stream, frames] = (*callable)(replies_received).cast<std::pair<py::object, uint64_t>>();
      return ResumeResult{stream_from_python(stream), frames};
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(py::str(error.value()).cast<std::string>());
    }
  };
  FetchTokenFunction token_for = [callable =
                                      make_shared_callable(std::move(make_fetch_token))](uint64_t number) {
    py::gil_scoped_acquire gil;
    return (*callable)(number).cast<std::string>();
  };
  return c10::make_intrusive<Connection>(stream_from_python(stream), std::move(options),
                                         std::move(resume_callback), std::move(token_for));
}

void attach_devices(int count, py::function open) {
  auto callable = make_shared_callable(std::move(open));
  store_python_main_thread_id();
  py::gil_scoped_release release;
  device_registry().attach_devices(count, [callable](int index) {
    py::gil_scoped_acquire gil;
    return (*callable)(index).cast<ConnectionPtr>();
  });
}

py::dict fetch_executor_counters_dict(Connection& connection, bool reset_peak) {
  StatsReply now = fetch_executor_counters(connection, reset_peak);
  py::dict found;
  found["tensors"] = now.storages;
  found["bytes_allocated"] = now.bytes_allocated;
  found["bytes_allocated_peak"] = now.bytes_allocated_peak;
  found["bytes_max"] = now.bytes_max;
  found["ops"] = now.ops;
  return found;
}

py::dict client_counters_dict(Connection& connection) {
  ConnectionCounters now;
  {
    py::gil_scoped_release release;
    now = connection.counters();
  }
  py::dict found;
  found["ops"] = now.ops;
  found["dynamic_ops"] = now.dynamic_ops;
  found["misses"] = now.template_misses;
  found["frames"] = now.frames;
  found["bytes_sent"] = now.bytes_sent;
  found["replies"] = now.replies;
  found["resumes"] = now.resumes;
  found["templates"] = now.templates;
  found["storages"] = now.storages;
  return found;
}

// The replay kind of a graph, the number of replays, and why no faster kind is used.
py::tuple fetch_graph_report(Connection& connection, uint32_t graph) {
  connection.check_not_recording("a graph report");
  PendingReply reply;
  {
    py::gil_scoped_release release;
    Connection::LockedRecordWriter writer(connection);
    writer.records().begin_record(RecordKind::GraphReport);
    writer.records().write_u32(graph);
    uint64_t number = writer.finish_record_and_request_reply(reply);
    connection.wait_for_reply(number, reply);
  }
  try {
    WireReader in(reply.payload.data(), reply.payload.size());
    uint8_t kind = in.read_u8();
    if (kind >= std::size(REPLAY_KIND_NAMES)) throw ProtocolError("unknown replay kind");
    uint64_t replays = in.read_u64();
    return py::make_tuple(REPLAY_KIND_NAMES[kind], replays, in.read_text());
  } catch (const ProtocolError& error) {
    connection.fail_session_and_raise(error);
  }
}

// How a recorded graph accesses the storage of each tensor: values of StorageAccess.
std::vector<int> storage_accesses_in_graph(const Connection& connection, uint32_t graph,
                                           const std::vector<at::Tensor>& tensors) {
  std::vector<int> accesses;
  for (const at::Tensor& tensor : tensors) {
    auto access = StorageAccess::Unused;
    if (tensor.device().type() == c10::DeviceType::PrivateUse1 && tensor.has_storage()) {
      const StorageHandle& handle = storage_handle_of(tensor);
      if (handle.connection.get() == &connection)
        access = connection.storage_access_in_graph(graph, handle.storage_number);
    }
    accesses.push_back(static_cast<int>(access));
  }
  return accesses;
}

// The byte range of a tensor in its storage.
struct TensorByteRange {
  size_t value_index;
  const c10::StorageImpl* storage;
  int64_t begin, end;
};

std::vector<TensorByteRange> find_tensor_byte_ranges(const std::vector<py::object>& values) {
  std::vector<TensorByteRange> all;
  for (size_t i = 0; i < values.size(); i++) {
    if (!THPVariable_Check(values[i].ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(values[i].ptr());
    if (!tensor.has_storage() || tensor.numel() == 0) continue;
    auto item = static_cast<int64_t>(tensor.itemsize());
    int64_t last = tensor.storage_offset();
    for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
    all.push_back(
        {i, tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset() * item, (last + 1) * item});
  }
  return all;
}

constexpr int64_t OVERLAP_GROUP_ALIGNMENT_BYTES = 16;  // the largest dtype

// For tensors whose memory may overlap, one tuple each: position among the values, position of the first of
// the group, position of the first that is the same object, offset in bytes from the aligned start of the
// group, strides, is_conj, is_neg. OverlappingInput in genie/device/graphs.py.
py::list describe_overlapping_tensors(const std::vector<py::object>& values,
                                      std::vector<TensorByteRange> group) {
  int64_t low = group[0].begin;  // sorted
  low -= low % OVERLAP_GROUP_ALIGNMENT_BYTES;
  std::sort(group.begin(), group.end(),
            [](const auto& a, const auto& b) { return a.value_index < b.value_index; });
  py::list found;
  for (const TensorByteRange& each : group) {
    const py::object& value = values[each.value_index];
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    auto same = std::find_if(group.begin(), group.end(), [&](const TensorByteRange& other) {
      return values[other.value_index].is(value);
    });
    found.append(py::make_tuple(each.value_index, group[0].value_index, same->value_index, each.begin - low,
                                py::tuple(py::cast(tensor.strides().vec())), tensor.is_conj(),
                                tensor.is_neg()));
  }
  return found;
}

// The groups of tensors among the values whose memory may overlap, concatenated; None if there are none.
py::object find_overlapping_inputs(const std::vector<py::object>& values) {
  std::vector<TensorByteRange> all = find_tensor_byte_ranges(values);
  std::sort(all.begin(), all.end(), [](const TensorByteRange& a, const TensorByteRange& b) {
    return std::tie(a.storage, a.begin, a.value_index) < std::tie(b.storage, b.begin, b.value_index);
  });
  std::map<size_t, py::list> groups;  // ordered by position, because addresses vary
  for (size_t i = 0; i < all.size();) {
    std::vector<TensorByteRange> group{all[i]};
    int64_t end = all[i].end;
    for (i++; i < all.size() && all[i].storage == group[0].storage && all[i].begin < end; i++) {
      group.push_back(all[i]);
      end = std::max(end, all[i].end);
    }
    if (group.size() == 1) continue;
    py::list found = describe_overlapping_tensors(values, group);
    groups.emplace(found[0].cast<py::tuple>()[0].cast<size_t>(), found);
  }
  if (groups.empty()) return py::none();
  py::list found;
  for (const auto& [first, group] : groups)
    for (py::handle each : group) found.append(each);
  return py::tuple(found);
}

// Sends the inputs of the next replay, without waiting.
void copy_graph_inputs(Connection& connection, const std::vector<at::Tensor>& graph_copies,
                       const std::vector<at::Tensor>& inputs) {
  c10::NoGradGuard no_grad;
  Connection::DeferredFlush flush(connection);
  for (size_t i = 0; i < graph_copies.size(); i++) graph_copies[i].copy_(inputs.at(i));
}

// Returns the caller's own copy of a graph's result. A result that fills its storage is copied only if
// needed.
at::Tensor copy_graph_result(const at::Tensor& result) {
  StorageHandle handle = storage_handle_of(result);
  bool fills = result.nbytes() == result.storage().nbytes() && !result.is_conj() && !result.is_neg();
  uint32_t storage = fills ? handle.connection->copy_graph_result(handle.storage_number) : 0;
  if (!storage) return result.clone();
  OutputSpec output;
  output.dtype = result.scalar_type();
  output.sizes.assign(result.sizes().begin(), result.sizes().end());
  output.strides.assign(result.strides().begin(), result.strides().end());
  output.is_contiguous = false;
  output.storage_bytes = static_cast<int64_t>(result.storage().nbytes());
  at::Tensor taken = make_remote_tensor(*handle.connection, storage, output);
  if (handle.connection->options().waits_for_every_op) handle.connection->synchronize();
  return taken;
}

void seed_default_generator(Connection& connection, uint64_t seed) {
  connection.check_not_recording("seeding");
  Connection::LockedRecordWriter writer(connection);
  writer.records().begin_record(RecordKind::Seed);
  writer.records().write_u32(0);
  writer.records().write_u64(seed);
  writer.finish_record();
  reset_cudnn_dropout(connection.options().device_index);
}

at::Tensor rng_state(int index) {
  at::Generator generator = device_registry().default_generator(index);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return at::Tensor(generator.get_state());
}

void set_rng_state(int index, const at::Tensor& state) {
  at::Generator generator = device_registry().default_generator(index);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

}  // namespace genie

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace genie;
  auto without_gil = py::call_guard<py::gil_scoped_release>();
  bind_stream(m);
  py::class_<Connection, ConnectionPtr>(m, "Connection", py::module_local())
      .def(py::init(&make_connection), py::kw_only(), py::arg("stream"), py::arg("index"),
           py::arg("device_name"), py::arg("executor"), py::arg("kind"), py::arg("op_timeout_s"),
           py::arg("blocking"), py::arg("flush_ops"), py::arg("host"), py::arg("port"),
           py::arg("server_name"), py::arg("resume"), py::arg("token"))
      .def_property_readonly("is_lost", &Connection::is_session_lost)
      .def("synchronize", &Connection::synchronize, without_gil)
      .def("copy_inputs", &copy_graph_inputs)
      .def("seed", &seed_default_generator, without_gil)
      .def("fetch_executor_counters", &fetch_executor_counters_dict, py::kw_only(),
           py::arg("reset_peak") = false)
      .def("client_counters", &client_counters_dict)
      .def("begin_graph", &Connection::begin_graph, without_gil, py::kw_only(), py::arg("thread"),
           py::arg("idle_s_max"))
      .def("end_graph", &Connection::end_graph, without_gil)
      .def("fetch_graph_report", &fetch_graph_report)
      .def("storage_accesses_in_graph", &storage_accesses_in_graph)
      .def("graph_written_storage_count", &Connection::graph_written_storage_count)
      .def("replay_graph", &Connection::replay_graph, without_gil)
      .def("free_graph", &Connection::free_graph, without_gil)
      .def("close", &Connection::close, without_gil);
  bind_graph_guard(m);
  m.attr("GRAPH_DISCARD") = GRAPH_DISCARD;
  m.attr("GRAPH_KEEP") = GRAPH_KEEP;
  m.attr("GRAPH_COMPILE") = GRAPH_COMPILE;
  m.attr("STORAGE_UNUSED") = static_cast<int>(StorageAccess::Unused);
  m.attr("STORAGE_READ") = static_cast<int>(StorageAccess::Read);
  m.attr("STORAGE_WRITTEN") = static_cast<int>(StorageAccess::Written);
  for (py::handle each : py::module_::import("genie.errors").attr("all_errors")()) {
    register_error_class(each.attr("code").cast<std::string>(), each.ptr());
  }
  m.def("register_kernels", [] {
    register_device_guard_and_hooks();
    return register_sent_ops();
  });
  m.def("try_keep_local_torch_accelerator", &try_keep_local_torch_accelerator);
  m.def("enter_remote_backward", &enter_remote_backward);
  m.def("leave_remote_backward", &leave_remote_backward);
  m.def("find_backward_device_kinds", [](const std::vector<at::Tensor>& roots) {
    BackwardDeviceKinds found = find_backward_device_kinds(roots);
    return std::make_pair(found.uses_remote_device, found.uses_local_accelerator);
  });
  m.def("copy_graph_result", &copy_graph_result);
  m.def("find_overlapping_inputs", &find_overlapping_inputs);
  m.def("attach_devices", &attach_devices);
  m.def("detach_devices", [] { device_registry().detach_devices(); });
  m.def("current_device", [] { return device_registry().current_device(); });
  m.def("set_device", [](int index) { device_registry().set_current_device(index); });
  m.def("set_device_unchecked", [](int index) { device_registry().set_current_device_unchecked(index); });
  m.def("rng_state", &rng_state, without_gil);
  m.def("set_rng_state", &set_rng_state, without_gil);
}
