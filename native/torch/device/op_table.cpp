// See op_table.h.
#include "op_table.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>

namespace genie {

namespace {

std::string op_identity(const c10::OperatorHandle& op) {
  std::ostringstream text;
  text << op.schema();
  for (at::Tag tag : op.getTags()) text << ' ' << static_cast<int>(tag);
  return std::move(text).str();
}

bool returns_alias_of_input(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

bool depends_on_kernel_settings(const c10::OperatorHandle& op) {
  return !op.hasTag(at::Tag::pointwise) && !returns_alias_of_input(op.schema());
}

class OpTable final {
 public:
  OpTable()
      : listening_(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(*this))) {}

  // Increases when an op is destroyed; addresses from before are then invalid.
  uint64_t destroyed_count() const { return destroyed_count_.load(std::memory_order_acquire); }

  const KnownOp& get(const c10::OperatorHandle& op) {
    std::string identity = op_identity(op);
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ops_.find(identity);
    if (found == ops_.end()) {
      auto number = static_cast<uint32_t>(ops_.size());
      found = ops_.emplace(std::move(identity),
                           KnownOp{number, depends_on_kernel_settings(op), compute_op_traits(op)})
                  .first;
    }
    return found->second;
  }

 private:
  struct Listener final : c10::OpRegistrationListener {
    explicit Listener(OpTable& table) : table(table) {}
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle&) override { table.destroyed_count_++; }
    OpTable& table;
  };

  std::atomic<uint64_t> destroyed_count_{1};
  std::mutex mutex_;
  std::unordered_map<std::string, KnownOp> ops_;  // references stay valid
  c10::RegistrationHandleRAII listening_;
};

OpTable& op_table() {
  static auto* table = new OpTable();
  return *table;
}

}  // namespace

const KnownOp& get_known_op(const c10::OperatorHandle& op) {
  struct CacheEntry {
    const void* schema = nullptr;
    uint64_t destroyed_count = 0;
    const KnownOp* known_op = nullptr;
  };
  static thread_local CacheEntry cache[1024];
  OpTable& table = op_table();
  const void* schema = &op.schema();
  uint64_t destroyed_count = table.destroyed_count();
  CacheEntry& entry = cache[(reinterpret_cast<uintptr_t>(schema) >> 6) & 1023];
  if (entry.schema != schema || entry.destroyed_count != destroyed_count)
    entry = {schema, destroyed_count, &table.get(op)};
  return *entry.known_op;
}

}  // namespace genie
