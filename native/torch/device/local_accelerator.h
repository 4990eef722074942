// Support for processes with a local GPU. torch knows one accelerator per process, and an out-of-tree device
// becomes it as soon as it is registered; backward passes on the local GPU then fail, and memory is no longer
// pinned for it. So the remote device is torch's accelerator only during backward passes over remote tensors,
// and the local GPU at all other times.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace genie {

// Call once, if there is a local accelerator. Returns false, and changes nothing, if torch's libraries are
// not as expected.
bool try_keep_local_torch_accelerator();

// For the calling thread: a backward pass over remote tensors begins and ends. Calls nest.
void enter_remote_backward();
void leave_remote_backward();

// The kinds of devices that a backward pass from these roots would use.
struct BackwardDeviceKinds {
  bool uses_remote_device = false;
  bool uses_local_accelerator = false;  // an accelerator of this machine
};
BackwardDeviceKinds find_backward_device_kinds(const std::vector<at::Tensor>& roots);

}  // namespace genie
