// Additive smoothing of demand: half a request is added for everything that the history might lack. Counts
// are in halves, to stay integers.
#pragma once

namespace genie {

constexpr int kHalvesPerRequest = 2;

}  // namespace genie
