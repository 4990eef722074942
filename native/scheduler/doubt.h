// That nobody asked for a thing lately does not prove that nobody will: half a request for it is believed to
// have been in the history besides what was. Counts are in halves, then, to stay whole.
#pragma once

namespace genie {

constexpr int kDoubt = 2;

}  // namespace genie
