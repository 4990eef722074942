// The session's random numbers. Generator 0 is the device's default one, which is this client's own because
// the process serves no other; the rest come to life when they are first named.
#pragma once

#include <cstdint>
#include <unordered_map>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace genie {

class Generators {
 public:
  explicit Generators(c10::Device device) : device_(device) {}

  // ProtocolError when the number is too large.
  at::Generator& get(uint32_t number);
  void seed(uint32_t number, uint64_t seed);
  // Bytes on the CPU.
  at::Tensor state(uint32_t number);
  void set_state(uint32_t number, const uint8_t* state, size_t bytes);
  // ProtocolError for the default one.
  void free(uint32_t number);
  void clear() { known_.clear(); }

 private:
  at::Generator make(uint32_t number) const;

  c10::Device device_;
  std::unordered_map<uint32_t, at::Generator> known_;
};

}  // namespace genie
