// Which ops go to executors whole, and which torch takes apart first.
#include <set>
#include <string>

#include <torch/library.h>

#include "dispatch.h"
#include "op_facts.h"

namespace genie {

namespace {

// They are right as torch composes them: views, bookkeeping, and what is made of empty and copy_.
const std::set<std::string>& composed() {
  static const std::set<std::string> names = {
      "aten::detach", "aten::alias", "aten::_to_copy", "aten::empty_like", "aten::lift", "aten::lift_fresh",
      "aten::_unsafe_view", "aten::is_pinned", "aten::_pin_memory", "aten::set_data",
      "aten::_efficientzerotensor", "aten::_lazy_clone", "aten::split_with_sizes", "aten::split",
      "aten::unbind", "aten::resize_as_", "aten::resize", "aten::set", "aten::is_same_size",
      "aten::_nested_tensor_size", "aten::_pack_padded_sequence",
      // executors do not take indices on trust; these are made of ops that check them
      "aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate"};
  return names;
}

bool gives_view(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  return false;
}

bool goes_whole(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (op.hasKernelForDispatchKey(Key::PrivateUse1) || composed().count(name) ||
      op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  bool functional = op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
  if (!functional && !op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd)) return false;
  if (schema.returns().empty() || gives_view(schema)) return false;
  if (contains(name, {"sparse", "nested", "_like", "new_"})) return false;
  bool any_tensor = false;
  for (const auto& argument : schema.arguments()) any_tensor |= takes_tensor(argument);
  if (!any_tensor) return false;
  // torch makes `out=` variants of functional ops by copying; sending those whole gains nothing.
  bool has_kernel = functional || op.hasKernelForDispatchKey(Key::CPU);
  return has_kernel || schema.overload_name().find("out") == std::string::npos;
}

}  // namespace

int register_ops() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !goes_whole(*op)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&send_op>());
    count++;
  }
  return count;
}

}  // namespace genie

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&genie::send_op>());
}
