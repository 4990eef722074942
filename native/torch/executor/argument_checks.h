// Checks of arguments that kernels of torch trust: shapes, and the values of index tensors. A kernel that is
// called with others reads or writes memory beyond its tensors.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace genie {

class OpArguments;
using ArgumentCheck = void (*)(OpArguments&);

// The check of an op, by its name without namespace and overload; null for an op whose kernels check for
// themselves. tests/executor/fuzz.py looks for ops that lack one.
ArgumentCheck find_argument_check(const std::string& op_name);

// Runs a check on the arguments of a call. OpRefused if a shape is wrong; IndexError if an index on the CPU
// is. On an accelerator, wrong indices are clamped in the order of its stream, because reading them would
// wait for it: the results are then unspecified, as they are without Genie, but no other memory is accessed.
void check_arguments(ArgumentCheck check, const c10::FunctionSchema& schema,
                     std::vector<c10::IValue>& arguments);

}  // namespace genie
