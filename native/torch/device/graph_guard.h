// Guards of recorded graphs: check that a model's tensors, modules and hooks are those of the recording; and
// the torch settings that a recording depends on.
#pragma once

#include <pybind11/pybind11.h>

namespace genie {

void bind_graph_guard(pybind11::module_& m);

}  // namespace genie
