// Sparse COO tensors, as far as the gradients of embeddings and the optimizers for them need: indices and
// values are two ordinary remote tensors. Other ops on sparse tensors raise torch's error for a missing
// kernel.
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_embedding_bag_sparse_backward.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/native_norm_native.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/unique_consecutive.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "dispatch.h"

namespace genie {

namespace {

using at::Tensor;

Tensor make_sparse(const Tensor& like, const Tensor& indices, const Tensor& values, bool is_coalesced) {
  return at::_sparse_coo_tensor_with_dims_and_tensors(like.sparse_dim(), like.dense_dim(), like.sizes(),
                                                      indices, values, values.options().layout(c10::kSparse),
                                                      is_coalesced);
}

Tensor with_values(const Tensor& sparse, const Tensor& values) {
  return make_sparse(sparse, sparse._indices(), values, sparse.is_coalesced());
}

c10::List<std::optional<Tensor>> index_per_dimension(const Tensor& sparse) {
  c10::List<std::optional<Tensor>> indices;
  for (const Tensor& each : sparse._indices().unbind(0)) indices.push_back(each);
  return indices;
}

// --- coalescing -----------------------------------------------------------------------------------

// One number per element: its position in a contiguous tensor of the sparse dimensions.
Tensor ravel_indices(const Tensor& sparse) {
  Tensor indices = sparse._indices(), positions = indices[0];
  for (int64_t dimension = 1; dimension < sparse.sparse_dim(); dimension++)
    positions = positions * sparse.size(dimension) + indices[dimension];
  return positions;
}

Tensor unravel_positions(const Tensor& sparse, Tensor positions) {
  std::vector<Tensor> indices(static_cast<size_t>(sparse.sparse_dim()));
  for (int64_t dimension = sparse.sparse_dim() - 1; dimension > 0; dimension--) {
    indices[static_cast<size_t>(dimension)] = positions.remainder(sparse.size(dimension));
    positions = positions.div(sparse.size(dimension), "floor");
  }
  indices[0] = positions;
  return at::stack(indices, 0);
}

// Values with the same index are added in their order, as torch's kernels do.
Tensor coalesce(const Tensor& self) {
  if (self._nnz() < 2 || self.sparse_dim() == 0) {
    TORCH_CHECK_NOT_IMPLEMENTED(self._nnz() < 2, "coalesce: the tensor has no sparse dimension");
    return make_sparse(self, self._indices().clone(), self._values().clone(), true);
  }
  auto [sorted, order] = ravel_indices(self).sort(/*stable=*/true, 0, /*descending=*/false);
  auto [positions, group, unused_counts] = at::unique_consecutive(sorted, /*return_inverse=*/true);
  Tensor values = self._values().index_select(0, order);
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[0] = positions.size(0);
  Tensor sums = at::zeros(sizes, values.options());
  c10::List<std::optional<Tensor>> groups;
  groups.push_back(group);
  sums.index_put_(groups, values, /*accumulate=*/true);
  return make_sparse(self, unravel_positions(self, positions), sums, true);
}

// --- arithmetic -----------------------------------------------------------------------------------

Tensor& add_sparse_to_dense_(Tensor& dense, const Tensor& sparse, const at::Scalar& alpha) {
  TORCH_CHECK(dense.sizes() == sparse.sizes(),
              "add: expected 'self' and 'other' to have same size, but self has size ", dense.sizes(),
              " while other has size ", sparse.sizes());
  if (sparse._nnz() == 0) return dense;
  Tensor values = alpha.equal(1) ? sparse._values() : sparse._values() * alpha;
  return dense.index_put_(index_per_dimension(sparse), values.to(dense.scalar_type()), /*accumulate=*/true);
}

Tensor add_sparse_to_sparse(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  TORCH_CHECK(self.sizes() == other.sizes() && self.sparse_dim() == other.sparse_dim(),
              "add: expected two sparse tensors of the same size and number of sparse dimensions");
  return make_sparse(self, at::cat({self._indices(), other._indices()}, 1),
                     at::cat({self._values(), alpha.equal(1) ? other._values() : other._values() * alpha}, 0),
                     /*is_coalesced=*/false);
}

Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  if (self.is_sparse() && other.is_sparse()) return add_sparse_to_sparse(self, other, alpha);
  TORCH_CHECK(!self.is_sparse(), "add(sparse, dense) is not supported. Use add(dense, sparse) instead.");
  Tensor sum = self.clone();
  return add_sparse_to_dense_(sum, other, alpha);
}

Tensor& add_(Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  if (!self.is_sparse()) return add_sparse_to_dense_(self, other, alpha);
  TORCH_CHECK(other.is_sparse(), "add(sparse, dense) is not supported. Use add(dense, sparse) instead.");
  return at::native::copy_sparse_(self, add_sparse_to_sparse(self, other, alpha), false);
}

void check_number(const char* op, const Tensor& sparse, const Tensor& number) {
  TORCH_CHECK_NOT_IMPLEMENTED(sparse.is_sparse() && !number.is_sparse() && number.dim() == 0, op,
                              ": a sparse remote tensor can only be combined with a number");
}

Tensor multiply_by_number(const Tensor& self, const Tensor& other) {
  if (!self.is_sparse()) return multiply_by_number(other, self);
  check_number("mul", self, other);
  return with_values(self, self._values() * other);
}

Tensor& multiply_by_number_(Tensor& self, const Tensor& other) {
  check_number("mul_", self, other);
  self._values().mul_(other);
  return self;
}

Tensor& multiply_into(const Tensor& self, const Tensor& other, Tensor& out) {
  return out.is_same(self) ? multiply_by_number_(out, other)
                           : at::native::copy_sparse_(out, multiply_by_number(self, other), false);
}

Tensor divide_by_number(const Tensor& self, const Tensor& other) {
  check_number("div", self, other);
  return with_values(self, self._values() / other);
}

Tensor& divide_by_number_(Tensor& self, const Tensor& other) {
  check_number("div_", self, other);
  self._values().div_(other);
  return self;
}

Tensor negate(const Tensor& self) { return with_values(self, self._values().neg()); }

// --- to and from dense tensors --------------------------------------------------------------------

Tensor sparse_mask(const Tensor& self, const Tensor& mask) {
  TORCH_CHECK(self.sizes() == mask.sizes(), "sparse_mask(): operands have incompatible sizes; self has size ",
              self.sizes(), " but mask has size ", mask.sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(!self.is_sparse(), "sparse_mask: a remote tensor must be dense");
  if (mask._nnz() == 0) return with_values(mask, mask._values().to(self.scalar_type()));
  return with_values(mask, self.index(index_per_dimension(mask)));
}

Tensor to_dense(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<bool>) {
  TORCH_CHECK(!dtype, "dtype argument is not supported by sparse_to_dense");
  Tensor dense = at::zeros(self.sizes(), self.options().layout(c10::kStrided));
  return add_sparse_to_dense_(dense, self, 1);
}

Tensor detach(const Tensor& self) { return with_values(self, self._values()); }

// --- embedding bags -------------------------------------------------------------------------------

// The number of the bag of each index.
Tensor number_bags(const Tensor& indices, const Tensor& offsets) {
  Tensor starts = at::zeros({indices.size(0) + 1}, offsets.options());
  starts.index_add_(0, offsets, at::ones_like(offsets));
  starts[0] -= 1;
  return starts.cumsum(0).narrow(0, 0, indices.size(0));
}

// Executors have dense tensors only, so a sparse gradient is composed here.
Tensor embedding_bag_backward(const Tensor& gradient, const Tensor& indices, const Tensor& offsets,
                              const Tensor& bag_numbers, const Tensor& bag_sizes,
                              const Tensor& maximum_indices, c10::SymInt weight_count,
                              bool scale_by_frequency, int64_t mode, bool sparse,
                              const std::optional<Tensor>& sample_weights, int64_t padding_index) {
  if (sparse) {
    bool is_numbered = bag_numbers.numel() > 0 || indices.numel() == 0;
    return at::_embedding_bag_sparse_backward_symint(
        gradient, indices, offsets, is_numbered ? bag_numbers : number_bags(indices, offsets), bag_sizes,
        weight_count, scale_by_frequency, mode, sample_weights, padding_index);
  }
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_embedding_bag_backward", "");
  torch::jit::Stack stack{gradient,  indices,         offsets,        bag_numbers,
                          bag_sizes, maximum_indices, weight_count,   scale_by_frequency,
                          mode,      sparse,          sample_weights, padding_index};
  send_op(op, {}, &stack);
  return stack.back().toTensor();
}

}  // namespace

}  // namespace genie

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  using namespace at::native;
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", new_with_dims_and_tensor_sparse_symint);
  m.impl("_sparse_coo_tensor_with_dims", new_with_dims_sparse);
  m.impl("empty.memory_format", empty_sparse_symint);
  m.impl("empty_like", empty_like_sparse_coo);
  m.impl("sparse_dim", sparse_dim_sparse);
  m.impl("dense_dim", dense_dim_sparse);
  m.impl("_dimI", sparse_dim_sparse);
  m.impl("_dimV", dense_dim_sparse);
  m.impl("_nnz", _nnz_sparse);
  m.impl("is_coalesced", is_coalesced_sparse);
  m.impl("_indices", _indices_sparse);
  m.impl("_values", _values_sparse);
  m.impl("indices", indices_sparse);
  m.impl("values", values_sparse);
  m.impl("_coalesced_", _coalesced_sparse_);
  m.impl("copy_", copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", copy_sparse_);
  m.impl("clone", clone_sparse);
  m.impl("zero_", zero_sparse_);
  m.impl("sparse_resize_", sparse_resize_);
  m.impl("sparse_resize_and_clear_", sparse_resize_and_clear_);
  m.impl("native_norm", static_cast<at::Tensor (*)(const at::Tensor&, const at::Scalar&)>(&norm_sparse));
  m.impl("_coalesce", genie::coalesce);
  m.impl("add.Tensor", genie::add);
  m.impl("add_.Tensor", genie::add_);
  m.impl("mul.Tensor", genie::multiply_by_number);
  m.impl("mul_.Tensor", genie::multiply_by_number_);
  m.impl("mul.out", genie::multiply_into);
  m.impl("div.Tensor", genie::divide_by_number);
  m.impl("div_.Tensor", genie::divide_by_number_);
  m.impl("neg", genie::negate);
  m.impl("sparse_mask", genie::sparse_mask);
  m.impl("_to_dense", genie::to_dense);
  m.impl("detach", genie::detach);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_embedding_bag_backward", genie::embedding_bag_backward); }
