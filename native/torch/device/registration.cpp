// Selects the ops that are sent to executors whole, and those that torch decomposes first.
#include <string>

#include <torch/library.h>

#include "dispatch.h"
#include "foreach.h"
#include "op_policy.h"
#include "op_traits.h"

namespace genie {

namespace {

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

bool writes_to_out_argument(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.is_out()) return true;
  return false;
}

bool is_in_place_foreach(const c10::FunctionSchema& schema) {
  return is_foreach_op(schema.name()) && schema.name().back() == '_';
}

bool is_sent_as_single_op(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const auto& schema = op.schema();
  uint8_t policy = get_op_policy(schema.name());
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) || (policy & DECOMPOSED) ||
      op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  bool functional = op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  if (!functional && !op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) return false;
  if ((schema.returns().empty() && !is_in_place_foreach(schema)) || returns_view(schema)) return false;
  bool any_tensor = false;
  for (const auto& argument : schema.arguments()) any_tensor |= accepts_tensor(argument);
  if (!any_tensor) return false;
  // torch composes `out=` variants of functional ops with a copy; sending those whole has no benefit.
  bool has_kernel = functional || op.hasKernelForDispatchKey(DispatchKey::CPU);
  return has_kernel || !writes_to_out_argument(schema) || (policy & SENT_WITH_OUTPUTS);
}

}  // namespace

int register_sent_ops() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !is_sent_as_single_op(*op)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), is_foreach_op(name.name)
                                    ? torch::CppFunction::makeFromBoxedFunction<&send_foreach_op>()
                                    : torch::CppFunction::makeFromBoxedFunction<&send_op>());
    count++;
  }
  return count;
}

}  // namespace genie

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&genie::send_op>());
}
