// Compiles graphs with a Python compiler (genie/executor/inductor.py): passes the steps as plain values and
// calls the resulting function with tensors.
#pragma once

#include <pybind11/pybind11.h>

#include "graph_table.h"

namespace genie {

// `object` has compile(steps, results, sizes, keep_alive), which returns a callable with `inputs` and
// `results`.
std::shared_ptr<GraphCompiler> make_python_compiler(pybind11::object object);

// Throws the C++ equivalent of a Python exception. The caller holds the GIL.
[[noreturn]] void throw_python_error(const pybind11::error_already_set& error);

}  // namespace genie
