#include "generator_table.h"

#include <cstring>
#include <mutex>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "../wire.h"

namespace genie {

namespace {

void check_generator_number(uint32_t number) {
  if (number < GENERATORS_MAX) return;
  throw ProtocolError("generator " + std::to_string(number) + " is out of range");
}

}  // namespace

at::Generator& GeneratorTable::get_or_create(uint32_t number) {
  auto found = generators_.find(number);
  if (found != generators_.end()) return found->second;
  check_generator_number(number);
  return generators_.emplace(number, create_generator(number)).first->second;
}

at::Generator GeneratorTable::create_generator(uint32_t number) const {
  auto& context = at::globalContext();
  if (number == 0) return context.defaultGenerator(device_);
  if (device_.is_cpu()) return at::detail::createCPUGenerator();
  return context.getAcceleratorHooksInterface(device_.type()).getNewGenerator(device_.index());
}

void GeneratorTable::seed(uint32_t number, uint64_t seed) {
  at::Generator& generator = get_or_create(number);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

at::Tensor GeneratorTable::get_state(uint32_t number) {
  at::Generator& generator = get_or_create(number);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void GeneratorTable::set_state(uint32_t number, const uint8_t* state, size_t bytes) {
  at::Generator& generator = get_or_create(number);
  at::Tensor copied = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
  if (bytes) std::memcpy(copied.mutable_data_ptr(), state, bytes);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(copied);
}

void GeneratorTable::free_generator(uint32_t number) {
  if (number == 0) throw ProtocolError("the default generator cannot be freed");
  // Not an error if it does not exist: the client may never have used it.
  check_generator_number(number);
  generators_.erase(number);
}

}  // namespace genie
