// Limits shared by the code that reads and writes streams.
#pragma once

#include <cstddef>
#include <cstdint>

namespace genie {

inline constexpr size_t WRITE_CHUNK_BYTES = 4u << 20;
// Timeout for the next byte of a message that has started, and for writing WRITE_CHUNK_BYTES.
inline constexpr int64_t STALL_TIMEOUT_US = 60'000'000;

}  // namespace genie
