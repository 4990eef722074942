// Compiles graphs with what torch has for that in Python: the steps are told to it as plain values, and the
// function that it makes is called with tensors. Not for: how they are compiled
// (genie/agent/executor/inductor.py).
#pragma once

#include <pybind11/pybind11.h>

#include "graphs.h"

namespace genie {

// `object` has compile(steps, wanted, sizes), which gives a callable with `inputs` and `results`.
std::shared_ptr<Compiler> python_compiler(pybind11::object object);

// What an exception of torch's Python means here. Holds the interpreter.
[[noreturn]] void raise_from_python(const pybind11::error_already_set& error);

}  // namespace genie
