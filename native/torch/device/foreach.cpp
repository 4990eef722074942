// See foreach.h.
#include "foreach.h"

#include <ATen/core/Tensor.h>

#include "dispatch.h"
#include "storage.h"

namespace genie {

namespace {

// More tensors than this might exceed the size of a record.
constexpr size_t TENSORS_PER_OP_MAX = 16384;

class ForeachArguments {
 public:
  ForeachArguments(const torch::jit::Stack& stack, size_t argument_count) {
    for (size_t i = stack.size() - argument_count; i < stack.size(); i++) {
      if (stack[i].isTensorList()) {
        for (const c10::IValue& item : stack[i].toListRef()) add(item.toTensor());
      } else if (stack[i].isTensor()) {
        add(stack[i].toTensor());
      }
    }
  }

  bool can_be_sent_as_single_op() const {
    return connection_ && is_on_one_executor_ && tensor_count_ <= TENSORS_PER_OP_MAX;
  }

 private:
  void add(const at::Tensor& tensor) {
    tensor_count_++;
    if (tensor.defined() && tensor.is_cpu() && tensor.dim() == 0) return;  // sent as a number
    if (!tensor.defined() || !has_storage_handle(tensor)) {
      is_on_one_executor_ = false;
      return;
    }
    const Connection* connection = storage_handle_of(tensor).connection.get();
    if (!connection_) connection_ = connection;
    is_on_one_executor_ = is_on_one_executor_ && connection == connection_;
  }

  size_t tensor_count_ = 0;
  const Connection* connection_ = nullptr;
  bool is_on_one_executor_ = true;
};

// As torch's kernels for GPUs do; else autograd would not notice the writes.
void bump_versions_of_written_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& declared = op.schema().arguments();
  for (size_t i = 0; i < declared.size(); i++) {
    const c10::IValue& value = stack[stack.size() - declared.size() + i];
    if (!declared[i].alias_info() || !declared[i].alias_info()->isWrite() || !value.isTensorList()) continue;
    for (const c10::IValue& item : value.toListRef()) item.toTensor().unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void send_foreach_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (ForeachArguments(*stack, op.schema().arguments().size()).can_be_sent_as_single_op()) {
    bump_versions_of_written_tensors(op, *stack);
    send_op(op, keys, stack);
  } else {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  }
}

}  // namespace genie
