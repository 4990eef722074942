// What recordings were made with, and whether it still holds: a model's tensors, modules and hooks, and
// settings of torch.
#pragma once

#include <pybind11/pybind11.h>

namespace genie {

void bind_watch(pybind11::module_& m);

}  // namespace genie
