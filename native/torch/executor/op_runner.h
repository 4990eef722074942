// Runs ops: calls torch's dispatcher with the arguments of a template and the data of a call, and checks the
// outputs against the client's prediction. No Python is involved.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "../wire.h"
#include "failure.h"
#include "generator_table.h"
#include "reply_writer.h"
#include "storage_table.h"
#include "templates.h"

namespace genie {

class OpRunner {
 public:
  OpRunner(StorageTable& storages, GeneratorTable& generators, ReplyWriter& replies)
      : storages_(storages), generators_(generators), replies_(replies) {}

  // Number of the last op, including skipped ones.
  uint64_t op_count() const { return op_count_.load(std::memory_order_relaxed); }

  // Runs an op with predicted outputs. A failure poisons the outputs; it is returned unless it was already
  // reported to the client.
  FailurePtr run(DecodedTemplate& op_template, WireReader& in);
  // Runs a dynamic op: writes its outputs to `reply` and keeps them until bind_outputs(). Returns its
  // failure.
  FailurePtr run_dynamic(DecodedTemplate& op_template, WireReader& in, uint64_t reply_number,
                         WireWriter& reply);
  // Skips a dynamic op, because an earlier failure has to be reported first.
  void skip_dynamic_op(const DecodedTemplate& op_template, WireReader& in);
  // Assigns storage numbers to the outputs of a dynamic op.
  void bind_outputs(uint64_t reply_number, uint32_t output_count, WireReader& in);
  // Releases the tensors of the current op.
  void release_current_op();
  void clear();

 private:
  // A tensor argument, and its state before the call.
  struct OpInput {
    at::Tensor tensor;
    StorageSlot* slot;
    const TensorMeta* meta;
    int64_t offset;
    bool is_written;
  };

  void invoke_op(DecodedTemplate& op_template, const uint8_t* call_data);
  c10::IValue to_ivalue(TemplateArgument& argument, const uint8_t*& call_data);
  const at::Tensor& load_tensor_argument(const TemplateArgument& argument, const uint8_t*& call_data);
  const at::Tensor& load_scalar_argument(TemplateArgument& argument, const uint8_t*& call_data);
  bool has_changed_metadata(const OpInput& input) const;
  void restore_resized_written_inputs() noexcept;

  void check_input_metadata_unchanged() const;
  void collect_output(const ExpectedOutput& predicted, const c10::IValue& output);
  at::Tensor to_predicted_layout(const at::Tensor& output, const TensorMeta& predicted) const;
  void check_predicted_alias(const ExpectedOutput& predicted, const c10::IValue& output) const;
  bool writes_to_unpoisoned_tensor(const std::vector<TemplateArgument>& arguments, const uint8_t* call_data);
  FailurePtr poison_outputs(const DecodedTemplate& op_template, const uint8_t* call_data,
                            const uint8_t* new_storages);

  void check_quota_for_outputs(const DecodedTemplate& op_template) const;
  void encode_output(const c10::IValue& value, WireWriter& reply);
  void encode_tensor(const at::Tensor& tensor, WireWriter& reply);
  at::Tensor copy_if_shared(const at::Tensor& output) const;
  void encode_resized_inputs(WireWriter& reply);

  StorageTable& storages_;
  GeneratorTable& generators_;
  ReplyWriter& replies_;
  std::atomic<uint64_t> op_count_{0};
  // State of the current op; members, so that their memory is reused.
  std::vector<c10::IValue> stack_;
  std::vector<OpInput> inputs_;
  std::vector<at::Tensor> new_tensors_;
  std::unordered_map<uint64_t, std::vector<at::Tensor>> unbound_outputs_;
};

}  // namespace genie
