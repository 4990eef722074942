// A process may have a GPU of its own. torch knows one accelerator per process, and takes a device from
// outside for it as soon as that has a name; backward passes on the local GPU then fail, and memory is no
// longer pinned for it. So torch is shown the remote device as its accelerator only inside backward passes
// over remote tensors, and the local GPU at all other times.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace genie {

// Once, and only where there is a local accelerator. False when torch's libraries do not look as expected;
// then nothing is changed.
bool step_aside();

// For the calling thread: a backward pass over remote tensors begins and ends. They nest.
void enter_backward();
void leave_backward();

// What a backward pass from these would run over.
struct Reach {
  bool remote = false;
  bool local = false;  // an accelerator of this machine
};
Reach reach_of(const std::vector<at::Tensor>& roots);

}  // namespace genie
