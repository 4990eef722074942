// The Python module genie_scheduler. genie/scheduler/placement/protocol.py documents the calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <tuple>

#include "placer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace genie {
namespace {

using ShapeTuple = std::tuple<int, int, int, uint64_t, double>;

std::vector<TypicalShape> to_typical_shapes(const std::vector<ShapeTuple>& shapes) {
  std::vector<TypicalShape> typical;
  for (const auto& [gpus, gpu_milli, cpu_milli, gpu_models, share] : shapes) {
    typical.push_back({gpus, gpu_milli, cpu_milli, gpu_models, share});
  }
  return typical;
}

nb::tuple gpu_mask_to_tuple(GpuMask gpus) {
  PyObject* numbers = PyTuple_New(std::popcount(gpus));
  Py_ssize_t at = 0;
  for (int g = 0; g < kGpusPerNodeMax; ++g) {
    if ((gpus >> g & 1) != 0) PyTuple_SET_ITEM(numbers, at++, PyLong_FromLong(g));
  }
  return nb::steal<nb::tuple>(numbers);
}

GpuMask gpu_mask_from_numbers(const std::vector<int>& numbers) {
  GpuMask gpus = 0;
  for (int g : numbers) {
    if (g < 0 || g >= kGpusPerNodeMax || (gpus >> g & 1) != 0)
      throw UsageError("GPUs must be different numbers from 0 to 15");
    gpus = static_cast<GpuMask>(gpus | 1 << g);
  }
  return gpus;
}

nb::object choice_to_python_tuple(const std::optional<NodeChoice>& choice) {
  if (!choice) return nb::none();
  return nb::make_tuple(choice->node, gpu_mask_to_tuple(choice->gpus));
}

// Consecutive places with the same GPUs share one tuple.
nb::object choice_to_python_tuple(const std::optional<std::vector<NodeChoice>>& choices) {
  if (!choices) return nb::none();
  PyObject* places = PyList_New(static_cast<Py_ssize_t>(choices->size()));
  nb::tuple numbers;
  for (size_t i = 0; i < choices->size(); ++i) {
    const NodeChoice& choice = (*choices)[i];
    if (i == 0 || choice.gpus != (*choices)[i - 1].gpus) numbers = gpu_mask_to_tuple(choice.gpus);
    PyObject* place = PyTuple_New(2);
    PyTuple_SET_ITEM(place, 0, PyLong_FromLong(choice.node));
    PyTuple_SET_ITEM(place, 1, nb::object(numbers).release().ptr());
    PyList_SET_ITEM(places, static_cast<Py_ssize_t>(i), place);
  }
  return nb::steal<nb::object>(places);
}

NodeSet make_node_set(const Placer& self, const std::vector<int>& numbers) {
  NodeSet nodes;
  for (int number : numbers) {
    self.cluster().node(number);  // throws if it does not exist
    nodes.add(number);
  }
  return nodes;
}

NodeSet make_node_set_except(const Placer& self, const std::vector<int>& numbers) {
  NodeSet nodes = self.cluster().all_nodes();
  for (int number : numbers) {
    self.cluster().node(number);  // throws if it does not exist
    nodes.remove(number);
  }
  return nodes;
}

void set_island_or_numa_numbers(std::array<uint8_t, kGpusPerNodeMax>& number_by_gpu,
                                const std::optional<std::vector<int>>& numbers, int gpus) {
  if (!numbers) return;
  const auto in_range = [](int number) { return number >= 0 && number < kGpusPerNodeMax; };
  if (static_cast<int>(numbers->size()) != gpus || !std::all_of(numbers->begin(), numbers->end(), in_range)) {
    throw UsageError("islands and numa must have a number from 0 to 15 for each GPU");
  }
  std::copy(numbers->begin(), numbers->end(), number_by_gpu.begin());
}

int add_node(Placer& self, int cpu_milli, int memory_mib, int gpus, int gpu_memory_mib, int model,
             int64_t tie_break_rank, const std::optional<std::vector<int>>& islands,
             const std::optional<std::vector<int>>& numa) {
  Node node;
  node.total_cpu_milli = cpu_milli;
  node.total_memory_mib = memory_mib;
  node.gpu_count = gpus;
  node.memory_per_gpu_mib = gpu_memory_mib;
  node.gpu_model = model;
  node.tie_break_rank =
      static_cast<uint32_t>(tie_break_rank < 0 ? int64_t{self.cluster().next_node_number()} : tie_break_rank);
  if (gpus >= 0 && gpus <= kGpusPerNodeMax) {
    set_island_or_numa_numbers(node.island_of_gpu, islands, gpus);
    set_island_or_numa_numbers(node.numa_node_of_gpu, numa, gpus);
  }
  return self.cluster().add_node(node);
}

int register_request_class(Placer& self, int gpus, int gpu_milli, int gpu_memory_mib, int cpu_milli,
                           int memory_mib, GpuModelMask gpu_models,
                           const std::optional<std::vector<int>>& nodes, bool needs_one_island,
                           const std::optional<std::vector<int>>& allowed_gpus) {
  RequestClass request{gpus,       gpu_milli,        gpu_memory_mib, cpu_milli, memory_mib,
                       gpu_models, needs_one_island, 0xffff,         {}};
  if (allowed_gpus) request.allowed_gpus = gpu_mask_from_numbers(*allowed_gpus);
  if (nodes) request.allowed_nodes = make_node_set(self, *nodes);
  return self.cluster().add_request_class(request);
}

nb::tuple node_state_to_python(const Placer& self, int number) {
  const Node& node = self.cluster().node(number);
  nb::list gpus;
  for (int g = 0; g < node.gpu_count; ++g) {
    const Gpu& gpu = node.gpus[g];
    gpus.append(nb::make_tuple(gpu.free_milli, gpu.free_memory_mib, gpu.tenant));
  }
  return nb::make_tuple(node.is_schedulable, node.free_cpu_milli, node.free_memory_mib, nb::tuple(gpus));
}

void raise_python_usage_error(const std::exception_ptr& raised, void*) {
  try {
    std::rethrow_exception(raised);
  } catch (const UsageError& error) {
    const nb::object usage_error = nb::module_::import_("genie.errors").attr("UsageError");
    PyErr_SetString(usage_error.ptr(), error.what());
  }
}

}  // namespace

NB_MODULE(genie_scheduler, module) {
  nb::set_leak_warnings(false);  // placers need not be destroyed before the process exits
  nb::register_exception_translator(raise_python_usage_error);
  nb::class_<Placer>(module, "Placer")
      .def(
          "__init__",
          [](Placer* self, const std::string& policy, uint64_t seed, const std::vector<ShapeTuple>& typical,
             double multi_gpu_capacity_weight, bool separates_gpu_models, int simulated_arrivals_max) {
            new (self) Placer(
                policy, seed, to_typical_shapes(typical),
                SupplyOptions{multi_gpu_capacity_weight, separates_gpu_models, simulated_arrivals_max});
          },
          "policy"_a, nb::kw_only(), "seed"_a = 0, "typical"_a = std::vector<ShapeTuple>{}, "gamma"_a = 0.05,
          "by_model"_a = true, "sequence_length_max"_a = 60)
      .def("add_node", &add_node, nb::kw_only(), "cpu_milli"_a, "memory_mib"_a, "gpus"_a,
           "gpu_memory_mib"_a = 0, "model"_a = 0, "tie_break_rank"_a = -1, "islands"_a = nb::none(),
           "numa"_a = nb::none())
      .def(
          "drop_node", [](Placer& self, int node) { self.cluster().drop_node(node); }, "node"_a)
      .def(
          "set_open",
          [](Placer& self, int node, bool open) { self.cluster().set_node_schedulable(node, open); },
          "node"_a, nb::kw_only(), "is_open"_a)
      .def("register_request_class", &register_request_class, nb::kw_only(), "gpus"_a = 0, "gpu_milli"_a = 0,
           "gpu_memory_mib"_a = 0, "cpu_milli"_a = 0, "memory_mib"_a = 0, "models_mask"_a = kAnyGpuModel,
           "nodes"_a = nb::none(), "one_island"_a = false, "only_gpus"_a = nb::none())
      .def("drop_class", &Placer::drop_request_class, "request_class"_a)
      .def(
          "register_node_set",
          [](Placer& self, const std::vector<int>& nodes, bool all_but) {
            return self.cluster().add_node_set(all_but ? make_node_set_except(self, nodes)
                                                       : make_node_set(self, nodes));
          },
          "nodes"_a, nb::kw_only(), "all_but"_a = false)
      .def(
          "drop_node_set", [](Placer& self, int number) { self.cluster().drop_node_set(number); },
          "node_set"_a)
      .def(
          "set_gpu",
          [](Placer& self, int node, int gpu, bool open, int memory_used_outside_cluster_mib) {
            self.cluster().set_gpu_state(node, gpu, open, memory_used_outside_cluster_mib);
          },
          "node"_a, "gpu"_a, nb::kw_only(), "is_open"_a, "memory_used_outside_cluster_mib"_a)
      .def("observe", &Placer::record_request_arrival, "request_class"_a, "tenant"_a)
      .def(
          "choose",
          [](Placer& self, int number, uint32_t tenant, std::optional<int> among) {
            return choice_to_python_tuple(self.choose_node(number, tenant, among));
          },
          "request_class"_a, "tenant"_a, nb::kw_only(), "among"_a = nb::none())
      .def(
          "place",
          [](Placer& self, int number, uint32_t tenant, std::optional<int> among) {
            return choice_to_python_tuple(self.choose_and_allocate(number, tenant, among));
          },
          "request_class"_a, "tenant"_a, nb::kw_only(), "among"_a = nb::none())
      .def(
          "place_gang",
          [](Placer& self, int number, uint32_t tenant, int workers, int worker_count_min,
             bool one_worker_per_node, const std::optional<std::vector<int>>& domains,
             std::optional<int> among) {
            return choice_to_python_tuple(self.place_gang(
                {number, tenant, workers, worker_count_min, one_worker_per_node}, domains, among));
          },
          "request_class"_a, "tenant"_a, nb::kw_only(), "workers"_a, "workers_min"_a = 0, "spread"_a = false,
          "domains"_a = nb::none(), "among"_a = nb::none())
      .def(
          "take",
          [](Placer& self, int number, uint32_t tenant, int node, const std::vector<int>& gpus) {
            self.cluster().allocate_resources(node, number, tenant, gpu_mask_from_numbers(gpus));
          },
          "request_class"_a, "tenant"_a, nb::kw_only(), "node"_a, "gpus"_a)
      .def(
          "release",
          [](Placer& self, int number, int node, const std::vector<int>& gpus) {
            self.cluster().release_resources(node, number, gpu_mask_from_numbers(gpus));
          },
          "request_class"_a, nb::kw_only(), "node"_a, "gpus"_a)
      .def("precompute", &Placer::precompute, "evaluations_max"_a = INT64_MAX)
      .def("node_state", &node_state_to_python, "node"_a);
}

}  // namespace genie
