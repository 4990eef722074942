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
#include "generators.h"
#include "reply_writer.h"
#include "storages.h"
#include "templates.h"

namespace genie {

class OpRunner {
 public:
  OpRunner(StorageTable& storages, Generators& generators, ReplyWriter& replies)
      : storages_(storages), generators_(generators), replies_(replies) {}

  // Number of the last op, including skipped ones.
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }

  // Runs an op with predicted outputs. A failure poisons the outputs; it is returned unless it was already
  // reported to the client.
  FailurePtr run(Template& call, Reader& in);
  // Runs a dynamic op: writes its outputs to `reply` and keeps them until bind(). Returns its failure.
  FailurePtr run_dynamic(Template& call, Reader& in, uint64_t reply_number, Writer& reply);
  // Skips a dynamic op, because an earlier failure has to be reported first.
  void skip(const Template& call, Reader& in);
  // Assigns storage numbers to the outputs of a dynamic op.
  void bind(uint64_t reply_number, uint32_t count, Reader& in);
  // Releases the tensors of the current op.
  void reset();
  void clear();

 private:
  // A tensor argument, and its state before the call.
  struct Input {
    at::Tensor tensor;
    Slot* slot;
    const TensorMeta* meta;
    int64_t offset;
    bool written;
  };

  void call(Template& call, const uint8_t* data);
  c10::IValue to_ivalue(Argument& argument, const uint8_t*& data);
  const at::Tensor& load_tensor(const Argument& argument, const uint8_t*& data);
  const at::Tensor& fill_scalar(Argument& argument, const uint8_t*& data);
  bool is_changed(const Input& input) const;
  void restore_written() noexcept;

  void check_unchanged() const;
  void collect(const Output& predicted, const c10::IValue& value);
  at::Tensor to_predicted(const at::Tensor& found, const TensorMeta& predicted) const;
  void check_alias(const Output& predicted, const c10::IValue& value) const;
  bool writes_usable_tensor(const std::vector<Argument>& arguments, const uint8_t* data);
  FailurePtr handle_failure(const Template& call, const uint8_t* data, const uint8_t* new_storages);

  void check_output_size(const Template& call) const;
  void encode(const c10::IValue& value, Writer& reply);
  void encode_tensor(const at::Tensor& tensor, Writer& reply);
  at::Tensor to_unshared(const at::Tensor& found) const;
  void encode_resized(Writer& reply);

  StorageTable& storages_;
  Generators& generators_;
  ReplyWriter& replies_;
  std::atomic<uint64_t> count_{0};
  // State of the current op; members, so that their memory is reused.
  std::vector<c10::IValue> stack_;
  std::vector<Input> inputs_;
  std::vector<at::Tensor> new_tensors_;
  std::unordered_map<uint64_t, std::vector<at::Tensor>> unbound_;
};

}  // namespace genie
