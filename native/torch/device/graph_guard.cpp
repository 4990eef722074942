// See graph_guard.h. Checked at every replay, so a check costs a few comparisons per weight and allocates
// nothing.
#include "graph_guard.h"

#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "current_settings.h"
#include "device_registry.h"

namespace py = pybind11;

namespace genie {

namespace {

constexpr size_t SCALAR_VALUE_BYTES_MAX = 16;  // the largest dtype

// Storage, offset, shape, strides and dtype of a tensor; for a CPU scalar also its value, which a recording
// contains.
class TensorSnapshot {
 public:
  explicit TensorSnapshot(const c10::TensorImpl& tensor)
      : storage_(tensor.unsafe_storage().getWeakStorageImpl()),
        offset_(tensor.storage_offset()),
        dtype_(tensor.dtype()),
        conjugate_(tensor.is_conj()),
        negative_(tensor.is_neg()) {
    if (!tensor.has_storage()) return;
    sizes_.append(tensor.sizes().begin(), tensor.sizes().end());
    strides_.append(tensor.strides().begin(), tensor.strides().end());
    scalar_value_bytes_ = is_cpu_scalar(tensor) ? tensor.itemsize() : 0;
    if (scalar_value_bytes_) std::memcpy(scalar_value_, scalar_data_ptr(tensor), scalar_value_bytes_);
  }

  bool matches(const c10::TensorImpl& tensor) const {
    if (tensor.unsafe_storage().unsafeGetStorageImpl() != storage_._unsafe_get_target()) return false;
    return !tensor.has_storage() ||
           (tensor.storage_offset() == offset_ && tensor.dtype() == dtype_ &&
            tensor.is_conj() == conjugate_ && tensor.is_neg() == negative_ &&
            tensor.sizes() == c10::IntArrayRef(sizes_) && tensor.strides() == c10::IntArrayRef(strides_) &&
            (!scalar_value_bytes_ ||
             std::memcmp(scalar_value_, scalar_data_ptr(tensor), scalar_value_bytes_) == 0));
  }

 private:
  static bool is_cpu_scalar(const c10::TensorImpl& tensor) {
    return tensor.device().is_cpu() && tensor.dim() == 0 && tensor.itemsize() <= SCALAR_VALUE_BYTES_MAX &&
           tensor.unsafe_storage().data();
  }
  static const void* scalar_data_ptr(const c10::TensorImpl& tensor) {
    return static_cast<const uint8_t*>(tensor.unsafe_storage().data()) +
           static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // so that its address is not reused
  int64_t offset_;
  caffe2::TypeMeta dtype_;
  bool conjugate_, negative_;
  c10::SmallVector<int64_t, 4> sizes_, strides_;
  size_t scalar_value_bytes_ = 0;
  uint8_t scalar_value_[SCALAR_VALUE_BYTES_MAX];
};

// Tensors that a graph was recorded with; the dicts of the model (parameters, modules, hooks); and single
// entries of dicts, by name. Supports Python's garbage collector.
class GraphGuard {
 public:
  using DictEntry = std::pair<py::dict, py::object>;
  GraphGuard(const std::vector<py::object>& tensors, const std::vector<py::dict>& dicts,
             const std::vector<DictEntry>& entries) {
    for (const py::object& tensor : tensors) {
      if (!THPVariable_Check(tensor.ptr())) throw py::type_error("GraphGuard expects tensors");
      guarded_tensors_.emplace_back(tensor, TensorSnapshot(tensor_impl_of(tensor)));
    }
    for (const py::dict& part : dicts) {
      module_dict_sizes_.emplace_back(part, part.size());
      for (const auto& [name, value] : part) {
        module_dict_entries_.emplace_back(part, py::reinterpret_borrow<py::object>(name),
                                          py::reinterpret_borrow<py::object>(value));
      }
    }
    for (const auto& [part, name] : entries) {
      module_dict_entries_.emplace_back(part, name,
                                        py::reinterpret_borrow<py::object>(look_up_dict_entry(part, name)));
    }
  }
  // Whether all tensors and dicts are unchanged.
  bool is_unchanged() const {
    for (const auto& [tensor, snapshot] : guarded_tensors_)
      if (!snapshot.matches(tensor_impl_of(tensor))) return false;
    for (const auto& [part, size] : module_dict_sizes_)
      if (part.size() != size) return false;
    for (const auto& [part, name, value] : module_dict_entries_)
      if (look_up_dict_entry(part, name) != value.ptr()) return false;
    return true;
  }

  static void enable_python_gc(PyHeapTypeObject* type) {
    type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->ht_type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      const GraphGuard* guard = graph_guard_from_python(self);
      return guard ? guard->traverse(visit, arg) : 0;
    };
    type->ht_type.tp_clear = [](PyObject* self) {
      GraphGuard* guard = graph_guard_from_python(self);
      // Destructors may call is_unchanged() again, so this object is emptied first.
      if (guard) GraphGuard dying(std::move(*guard));
      return 0;
    };
  }

 private:
  GraphGuard(GraphGuard&&) = default;

  // Null while it is being constructed.
  static GraphGuard* graph_guard_from_python(PyObject* self) {
    auto* instance = reinterpret_cast<py::detail::instance*>(self);
    auto held = instance->get_value_and_holder();
    return held.holder_constructed() ? held.value_ptr<GraphGuard>() : nullptr;
  }
  static const c10::TensorImpl& tensor_impl_of(const py::object& tensor) {
    return *THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl();
  }
  static PyObject* look_up_dict_entry(const py::dict& module_dict, const py::object& name) {
    PyObject* value = PyDict_GetItemWithError(module_dict.ptr(), name.ptr());
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }
  int traverse(visitproc visit, void* arg) const {
    for (const auto& [tensor, snapshot] : guarded_tensors_) Py_VISIT(tensor.ptr());
    for (const auto& [part, size] : module_dict_sizes_) Py_VISIT(part.ptr());
    for (const auto& [part, name, value] : module_dict_entries_) {
      Py_VISIT(part.ptr());
      Py_VISIT(name.ptr());
      Py_VISIT(value.ptr());
    }
    return 0;
  }

  std::vector<std::pair<py::object, TensorSnapshot>> guarded_tensors_;
  std::vector<std::pair<py::dict, size_t>> module_dict_sizes_;
  std::vector<std::tuple<py::dict, py::object, py::object>>
      module_dict_entries_;  // null value: no such entry
};

// Settings of the process and of this thread that a recording depends on.
py::bytes torch_settings_key() {
  constexpr auto REMOTE_DEVICE_TYPE = c10::DeviceType::PrivateUse1;
  struct {
    Settings settings;
    uint8_t autocast_dtype, current_device;
  } key{{current_base_settings(), current_kernel_settings(PrecisionsOf::All)}, UINT8_MAX, 0};
  static_assert(std::has_unique_object_representations_v<decltype(key)>);
  if (at::autocast::is_autocast_enabled(REMOTE_DEVICE_TYPE))
    key.autocast_dtype = static_cast<uint8_t>(at::autocast::get_autocast_dtype(REMOTE_DEVICE_TYPE));
  key.current_device = static_cast<uint8_t>(device_registry().current_device());
  return {reinterpret_cast<const char*>(&key), sizeof key};
}

}  // namespace

void bind_graph_guard(py::module_& m) {
  py::class_<GraphGuard>(m, "GraphGuard", py::module_local(),
                         py::custom_type_setup(&GraphGuard::enable_python_gc))
      .def(py::init<const std::vector<py::object>&, const std::vector<py::dict>&,
                    const std::vector<GraphGuard::DictEntry>&>())
      .def("is_unchanged", &GraphGuard::is_unchanged);
  m.def("torch_settings_key", &torch_settings_key);
}

}  // namespace genie
