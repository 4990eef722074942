// Raises Genie's Python errors, or torch's own where torch has a class for the error.
#pragma once

#include <string>

#include "../wire.h"

namespace genie {

// Registers the Python class of an error code, before anything is raised. The class is kept alive forever.
void register_error_class(const std::string& code, void* python_class);

// `code` as in genie/errors.py, e.g. "device.lost". Does not need the GIL.
[[noreturn]] void raise_python_error(const std::string& code, const std::string& message);

// Text of an executor for a Python message: the bytes may be anything, so only ASCII is kept.
std::string to_ascii(const std::string& text);

// Raises an error that an executor sent; the message names the op, if there is one.
[[noreturn]] void raise_remote_error(const RemoteError& error, const std::string& device_name);

}  // namespace genie
