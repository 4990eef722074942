// See op_traits.h.
#include "op_traits.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace genie {

bool contains_any_substring(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) != std::string::npos) return true;
  return false;
}

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
  if (contains_any_substring(name, {"_pad", "copysign"}) ||
      op.schema().overload_name().find("_mode") != std::string::npos)
    return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
         op.dumpState().find("RegisterMeta") != std::string::npos;
}

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
    traits.is_number_argument.push_back(type->kind() == c10::TypeKind::NumberType);
    traits.is_mutable_argument.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    any_tensor |= accepts_tensor(argument);
  }
  set_undeclared_write_traits(schema, traits);
  // Their output shapes depend on numbers.
  traits.sends_numbers_as_data =
      any_tensor && !contains_any_substring(name, {"upsample", "arange", "range", "linspace", "logspace",
                                                   "hist", "_fused_sdp_choice"});
  traits.accepts_cpu_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
                               contains_any_substring(name, {"_unsafe_index", "aten::_unsafe_masked"});
  // torch tags this op because of masks; with other indices, shapes determine the outputs.
  traits.outputs_depend_on_masks = name == "aten::index";
  traits.outputs_depend_on_values =
      !traits.outputs_depend_on_masks &&
      (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
  // Their output shapes differ from those of the meta functions, depending on the accelerator.
  traits.has_reliable_meta_kernel = !contains_any_substring(name, {"batch_norm",
                                                                   "embedding_bag",
                                                                   "_scaled_dot_product",
                                                                   "_flash_attention",
                                                                   "_efficient_attention",
                                                                   "_cudnn",
                                                                   "miopen",
                                                                   "_thnn",
                                                                   "ctc_loss",
                                                                   "layer_norm",
                                                                   "multilabel_margin_loss",
                                                                   "log_sigmoid",
                                                                   "_fused_sdp_choice",
                                                                   "linalg",
                                                                   "cholesky",
                                                                   "triangular_solve",
                                                                   "lu_",
                                                                   "geqrf",
                                                                   "ormqr",
                                                                   "orgqr",
                                                                   "nonzero_static",
                                                                   "_fft_"});
  traits.shares_meta_function_with_kernels = shares_meta_function_with_kernels(op);
  return traits;
}

}  // namespace

// Schemas live as long as the process, so their address identifies them.
const OpTraits& get_op_traits(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const void*, OpTraits>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = all->find(&op.schema());
  if (found == all->end()) found = all->emplace(&op.schema(), compute_op_traits(op)).first;
  return found->second;
}

}  // namespace genie
