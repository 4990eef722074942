// The state of cuDNN's dropout in recurrent layers.
#pragma once

namespace genie {

// To be called when the default generator of the device is seeded: as on a local GPU, the next recurrent
// layer with dropout creates the state anew. Thread-safe.
void reset_cudnn_dropout(int device_index);

}  // namespace genie
