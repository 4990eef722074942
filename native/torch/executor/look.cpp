#include "look.h"

namespace genie {

namespace {

constexpr int64_t BYTES_MAX = int64_t{1} << 62;

int64_t checked_sum(int64_t one, int64_t other) {
  int64_t sum = 0;
  if (__builtin_add_overflow(one, other, &sum) || sum > BYTES_MAX) {
    throw ProtocolError("a tensor is larger than can be counted");
  }
  return sum;
}

int64_t checked_product(int64_t one, int64_t other) {
  int64_t product = 0;
  if (__builtin_mul_overflow(one, other, &product) || product > BYTES_MAX) {
    throw ProtocolError("a tensor is larger than can be counted");
  }
  return product;
}

void read_numbers(Reader& in, size_t count, c10::SmallVector<int64_t, 5>& into) {
  into.resize(count);
  for (int64_t& number : into) {
    number = in.i64();
    if (number < 0) throw ProtocolError("a tensor has a negative size or stride");
  }
}

void measure(Look& look) {
  int64_t elements = 1, last = 0;
  for (int64_t size : look.sizes) elements = size == 0 ? 0 : elements;
  if (elements == 0) return;
  for (size_t i = 0; i < look.sizes.size(); i++) {
    elements = checked_product(elements, look.sizes[i]);
    last = checked_sum(last, checked_product(look.sizes[i] - 1, look.strides[i]));
  }
  auto item = static_cast<int64_t>(look.item_bytes);
  look.content_bytes = static_cast<uint64_t>(checked_product(elements, item));
  look.span_bytes = static_cast<uint64_t>(checked_product(checked_sum(last, 1), item));
}

}  // namespace

c10::ScalarType checked_dtype(uint8_t number) {
  auto dtype = static_cast<c10::ScalarType>(number);
  if (!is_carried(dtype)) throw ProtocolError("a tensor has a dtype that is not carried");
  return dtype;
}

Look read_look(Reader& in, uint8_t dtype, uint8_t dimensions, uint8_t flags) {
  if (dimensions > DIMENSIONS_MAX) throw ProtocolError("a tensor has too many dimensions");
  Look look;
  look.dtype = checked_dtype(dtype);
  look.flags = flags & (VIEW_CONJUGATE | VIEW_NEGATIVE);
  if ((flags & VIEW_CONJUGATE) && !c10::isComplexType(look.dtype)) {
    throw ProtocolError("only complex numbers have a conjugate");
  }
  look.item_bytes = c10::elementSize(look.dtype);
  read_numbers(in, dimensions, look.sizes);
  read_numbers(in, dimensions, look.strides);
  measure(look);
  return look;
}

View read_view(Reader& in) {
  View view;
  view.storage = in.u32();
  uint8_t dtype = in.u8(), dimensions = in.u8(), flags = in.u8();
  in.u8();
  view.offset = in.i64();
  view.look = read_look(in, dtype, dimensions, flags);
  return view;
}

std::string described(c10::ScalarType dtype, c10::IntArrayRef sizes) {
  // No streams: a compiler may give this library its own ones, which do not go with torch's.
  std::string text = std::string(c10::toString(dtype)) + " [";
  for (size_t i = 0; i < sizes.size(); i++) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

uint64_t end_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); i++) {
    last = checked_sum(last, checked_product(tensor.size(i) - 1, tensor.stride(i)));
  }
  auto item = static_cast<int64_t>(tensor.itemsize());
  return static_cast<uint64_t>(checked_product(checked_sum(last, 1), item));
}

}  // namespace genie
