// What the device raises: Genie's own Python errors, or torch's where torch has one for it.
#pragma once

#include <cstdint>
#include <string>

namespace genie {

// The classes that codes stand for; before anything is raised. They live for ever.
void set_error_class(const std::string& code, void* python_class);

// By the code that genie/errors.py gives it, e.g. "device.lost". Needs no GIL.
[[noreturn]] void raise(const std::string& code, const std::string& message);

// An error that an executor sent: the op's name and number are added to the message where there is one.
[[noreturn]] void raise_remote(const std::string& code, const std::string& op, uint64_t number,
                               const std::string& message, const std::string& device_name);

}  // namespace genie
