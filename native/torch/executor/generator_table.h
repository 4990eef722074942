// The random number generators of a session. Generator 0 is the default generator of the device, which this
// process does not share with another client; others are created on first use.
#pragma once

#include <cstdint>
#include <unordered_map>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace genie {

class GeneratorTable {
 public:
  explicit GeneratorTable(c10::Device device) : device_(device) {}

  // ProtocolError if the number is too large.
  at::Generator& get_or_create(uint32_t number);
  void seed(uint32_t number, uint64_t seed);
  // A CPU tensor of bytes.
  at::Tensor get_state(uint32_t number);
  void set_state(uint32_t number, const uint8_t* state, size_t bytes);
  // ProtocolError for the default generator.
  void free_generator(uint32_t number);
  void clear() { generators_.clear(); }

 private:
  at::Generator create_generator(uint32_t number) const;

  c10::Device device_;
  std::unordered_map<uint32_t, at::Generator> generators_;
};

}  // namespace genie
