// Runs ops: the data of a call and a template become a call through torch's dispatcher, and what comes back
// is held against what the client takes it for. No Python is involved.
// Not for: which ops may run (templates.h), and where their results live (storages.h).
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
#include "outbox.h"
#include "storages.h"
#include "templates.h"

namespace genie {

class OpRunner {
 public:
  OpRunner(StorageTable& storages, Generators& generators, Outbox& outbox)
      : storages_(storages), generators_(generators), outbox_(outbox) {}

  // How many ops were run or should have been; an op's number.
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }

  // An op whose outputs are predicted. A failure is in the outputs, and is returned when the client has not
  // been told of it yet.
  FailurePtr run(Template& call, Reader& in);
  // An op whose outputs are not known: they are written to `reply`, and wait for bind(). On failure, that.
  FailurePtr ask(Template& call, Reader& in, uint64_t reply_number, Writer& reply);
  // An op that is not run, because something else has to be said first.
  void pass_over(const Template& call, Reader& in);
  // Gives the results of an ask() their numbers.
  void bind(uint64_t reply_number, uint32_t count, Reader& in);
  // Forgets the op at hand, after it has ended with something that ends a session.
  void let_go();
  void clear();

 private:
  // A tensor that the op is given, and what it looked like.
  struct Given {
    at::Tensor tensor;
    Slot* slot;
    const Look* look;
    int64_t offset;
    bool written;
  };

  void call(Template& call, const uint8_t* data);
  c10::IValue value_of(Argument& argument, const uint8_t*& data);
  const at::Tensor& give(const Argument& argument, const uint8_t*& data);
  const at::Tensor& fill_scalar(Argument& argument, const uint8_t*& data);
  bool is_changed(const Given& given) const;
  void restore_written() noexcept;

  void check_unchanged() const;
  void collect(const Output& predicted, const c10::IValue& value);
  at::Tensor as_predicted(const at::Tensor& found, const Look& predicted) const;
  void check_same(const Output& predicted, const c10::IValue& value) const;
  bool reaches_healthy(const std::vector<Argument>& arguments, const uint8_t* data);
  FailurePtr fail(const Template& call, const uint8_t* data, const uint8_t* new_storages);

  void check_announced(const Template& call) const;
  void encode(const c10::IValue& value, Writer& reply);
  void encode_tensor(const at::Tensor& tensor, Writer& reply);
  at::Tensor as_own(const at::Tensor& found) const;
  void encode_changes(Writer& reply);

  StorageTable& storages_;
  Generators& generators_;
  Outbox& outbox_;
  std::atomic<uint64_t> count_{0};
  // Of the op at hand; kept for their memory.
  std::vector<c10::IValue> stack_;
  std::vector<Given> given_;
  std::vector<at::Tensor> made_;
  std::unordered_map<uint64_t, std::vector<at::Tensor>> unbound_;
};

}  // namespace genie
