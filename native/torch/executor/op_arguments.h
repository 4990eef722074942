// The arguments of a call by name, for the checks of argument_checks.cpp.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace genie {

// Whether the code that inductor generates for an op checks its indices, or calls the kernel that trusts
// them.
enum class CompiledCode { TrustsIndices, ChecksIndices };

// The tensors may be on the meta device, for an op that is compiled: then only shapes are checked, and ops
// whose values must be checked are refused.
//
// Functions with a name throw OpRefused if there is no such argument, or if it is a tensor without a value.
class OpArguments {
 public:
  OpArguments(const c10::FunctionSchema& schema, std::vector<c10::IValue>& values)
      : schema_(schema), values_(values) {}

  bool has_argument(const char* name) const { return schema_.argumentIndexWithName(name).has_value(); }
  // Null if the overload has no such argument, or if it is none or undefined.
  const at::Tensor* find_tensor(const char* name) const;
  const at::Tensor& tensor(const char* name) const;
  std::vector<at::Tensor> tensors(const char* name) const;
  int64_t integer(const char* name) const { return value(name).toInt(); }
  // The default if the argument is none.
  int64_t integer_or(const char* name, int64_t default_value) const {
    return value(name).isNone() ? default_value : integer(name);
  }
  // None if the overload has no such argument, or if it is none.
  std::optional<double> try_float(const char* name) const;
  bool boolean(const char* name) const { return value(name).toBool(); }
  std::vector<int64_t> integers(const char* name) const { return value(name).toIntVector(); }
  // The numbers of a list or of a tensor. Waits for the accelerator: only for ops that do so themselves, or
  // that are rare.
  std::vector<int64_t> host_integers(const char* name) const;
  std::vector<int64_t> host_integers(const at::Tensor& tensor) const;

  // OpRefused with the message if it is not true.
  void require(bool is_true, const std::string& message) const;
  void require_sizes(const char* name, c10::IntArrayRef sizes) const;
  void require_count(const char* name, int64_t count) const;
  // Replaces those of the tensors that have gaps or elements in common by contiguous copies, for kernels that
  // ignore strides.
  void make_dense(std::initializer_list<const char*> names);
  // The values of a tensor of integers are at least `first` and less than `end`. IndexError on the CPU;
  // otherwise the argument is replaced by one with clamped values, without waiting.
  void bound_indices(const char* name, int64_t first, int64_t end,
                     CompiledCode compiled = CompiledCode::TrustsIndices);

 private:
  size_t position(const char* name) const;
  const c10::IValue& value(const char* name) const { return values_[position(name)]; }
  void check_bounds_on_cpu(const char* name, const at::Tensor& indices, int64_t first, int64_t end) const;

  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue>& values_;
};

}  // namespace genie
