#include "tensor_meta.h"

namespace genie {

namespace {

constexpr int64_t BYTES_MAX = int64_t{1} << 62;

int64_t add_checked(int64_t one, int64_t other) {
  int64_t sum = 0;
  if (__builtin_add_overflow(one, other, &sum) || sum > BYTES_MAX) {
    throw ProtocolError("the size of a tensor overflows");
  }
  return sum;
}

int64_t multiply_checked(int64_t one, int64_t other) {
  int64_t product = 0;
  if (__builtin_mul_overflow(one, other, &product) || product > BYTES_MAX) {
    throw ProtocolError("the size of a tensor overflows");
  }
  return product;
}

void read_dimensions(WireReader& in, size_t count, c10::SmallVector<int64_t, 5>& dimensions) {
  dimensions.resize(count);
  for (int64_t& number : dimensions) {
    number = in.read_i64();
    if (number < 0) throw ProtocolError("a tensor has a negative size or stride");
  }
}

void compute_byte_counts(TensorMeta& meta) {
  int64_t elements = 1, last = 0;
  for (int64_t size : meta.sizes) elements = size == 0 ? 0 : elements;
  if (elements == 0) return;
  for (size_t i = 0; i < meta.sizes.size(); i++) {
    elements = multiply_checked(elements, meta.sizes[i]);
    last = add_checked(last, multiply_checked(meta.sizes[i] - 1, meta.strides[i]));
  }
  auto item = static_cast<int64_t>(meta.item_bytes);
  meta.content_bytes = static_cast<uint64_t>(multiply_checked(elements, item));
  meta.span_bytes = static_cast<uint64_t>(multiply_checked(add_checked(last, 1), item));
}

}  // namespace

c10::ScalarType to_supported_dtype(uint8_t number) {
  auto dtype = static_cast<c10::ScalarType>(number);
  if (!is_supported_dtype(dtype)) throw ProtocolError("a tensor has an unsupported dtype");
  return dtype;
}

TensorMeta read_tensor_meta(WireReader& in, uint8_t dtype, uint8_t dimensions, uint8_t flags) {
  if (dimensions > DIMENSIONS_MAX) throw ProtocolError("a tensor has too many dimensions");
  TensorMeta meta;
  meta.dtype = to_supported_dtype(dtype);
  meta.flags = flags & (VIEW_CONJUGATE | VIEW_NEGATIVE);
  if ((flags & VIEW_CONJUGATE) && !c10::isComplexType(meta.dtype)) {
    throw ProtocolError("a tensor that is not complex has the conjugate bit");
  }
  meta.item_bytes = c10::elementSize(meta.dtype);
  read_dimensions(in, dimensions, meta.sizes);
  read_dimensions(in, dimensions, meta.strides);
  compute_byte_counts(meta);
  return meta;
}

StorageView read_storage_view(WireReader& in) {
  StorageView view;
  view.storage = in.read_u32();
  uint8_t dtype = in.read_u8(), dimensions = in.read_u8(), flags = in.read_u8();
  in.read_u8();
  view.offset = in.read_i64();
  view.meta = read_tensor_meta(in, dtype, dimensions, flags);
  return view;
}

std::string describe_sizes(c10::IntArrayRef sizes) {
  // No iostreams: this library may be linked with another implementation of them than torch.
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); i++) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string describe_tensor(c10::ScalarType dtype, c10::IntArrayRef sizes) {
  return std::string(c10::toString(dtype)) + " " + describe_sizes(sizes);
}

uint64_t storage_end_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); i++) {
    last = add_checked(last, multiply_checked(tensor.size(i) - 1, tensor.stride(i)));
  }
  auto item = static_cast<int64_t>(tensor.itemsize());
  return static_cast<uint64_t>(multiply_checked(add_checked(last, 1), item));
}

}  // namespace genie
