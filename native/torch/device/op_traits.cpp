// See op_traits.h.
#include "op_traits.h"

#include <algorithm>

#include "op_policy.h"

namespace genie {

bool accepts_tensor(const c10::Argument& argument) {
  return argument.type()->str().find("Tensor") != std::string::npos;
}

namespace {

void set_undeclared_write_traits(const c10::FunctionSchema& schema, OpTraits& traits) {
  static const char* const BATCH_NORM_OP_NAMES[] = {
      "aten::native_batch_norm",       "aten::cudnn_batch_norm",
      "aten::miopen_batch_norm",       "aten::batch_norm_update_stats",
      "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"};
  traits.may_write_batch_norm_statistics =
      std::find(std::begin(BATCH_NORM_OP_NAMES), std::end(BATCH_NORM_OP_NAMES), schema.name()) !=
      std::end(BATCH_NORM_OP_NAMES);
  for (size_t i = 0; traits.may_write_batch_norm_statistics && i < schema.arguments().size(); i++) {
    const std::string& name = schema.arguments()[i].name();
    traits.is_batch_norm_statistic.push_back(name == "running_mean" || name == "running_var");
    if (name == "training") traits.training_argument_index = i;
  }
}

// The meta functions of structured ops are part of their kernels; torch registers those in its RegisterMeta
// files. clone is implemented once for all devices. Excepted are kernels that change the memory format of
// their outputs, and ops whose meta function torch replaces by a composition of other ops.
bool shares_meta_function_with_kernels(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name == "aten::clone") return true;
  bool is_composed = op.schema().overload_name().find("_mode") != std::string::npos;
  if (is_composed || (get_op_policy(name) & KERNEL_SETS_FORMAT)) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
         op.dumpState().find("RegisterMeta") != std::string::npos;
}

}  // namespace

OpTraits compute_op_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  OpTraits traits;
  traits.argument_count = schema.arguments().size();
  traits.return_count = schema.returns().size();
  traits.writes_arguments = schema.is_mutable();
  bool any_tensor = false;
  for (const auto& argument : schema.arguments()) {
    auto type = argument.type();
    if (auto* optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType();
    auto* list = type->castRaw<c10::ListType>();
    traits.has_numbers.push_back((list ? list->getElementType() : type)->kind() == c10::TypeKind::NumberType);
    traits.is_mutable_argument.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    any_tensor |= accepts_tensor(argument);
  }
  set_undeclared_write_traits(schema, traits);
  uint8_t policy = get_op_policy(name);
  traits.sends_numbers_as_data = any_tensor && !(policy & SHAPE_FROM_NUMBERS);
  traits.accepts_cpu_indices = policy & CPU_INDICES;
  // torch tags this op because of masks; with other indices, shapes determine the outputs.
  traits.outputs_depend_on_masks = name == "aten::index";
  traits.outputs_depend_on_values =
      !traits.outputs_depend_on_masks &&
      (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
  traits.returns_device_property = name == "aten::cudnn_is_acceptable";
  traits.has_reliable_meta_kernel = !(policy & EXECUTOR_INFERS);
  traits.shares_meta_function_with_kernels = shares_meta_function_with_kernels(op);
  return traits;
}

}  // namespace genie
