// How a tensor looks on a stretch of memory: dtype, sizes, strides, lazy bits. It comes from the wire, and is
// checked.
// Not for: which memory that is (storages.h).
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include "../wire.h"

namespace genie {

// Elements before the first one; far beyond any memory, and small enough to count in bytes.
constexpr int64_t OFFSET_MAX = int64_t{1} << 56;

struct Look {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint8_t flags = 0;  // VIEW_CONJUGATE, VIEW_NEGATIVE
  c10::SmallVector<int64_t, 5> sizes, strides;
  uint64_t item_bytes = 0;
  uint64_t content_bytes = 0;  // of all elements, one after the other
  uint64_t span_bytes = 0;     // from the first element to the end of the last; 0 when there are none

  // Whether the tensor looks like this at this offset.
  bool fits(const at::Tensor& tensor, int64_t offset) const {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return impl.storage_offset() == offset && impl.dtype().toScalarType() == dtype &&
           impl.sizes() == c10::IntArrayRef(sizes) && impl.strides() == c10::IntArrayRef(strides) &&
           impl.is_conj() == ((flags & VIEW_CONJUGATE) != 0) &&
           impl.is_neg() == ((flags & VIEW_NEGATIVE) != 0);
  }
};

// What is_carried() allows, else ProtocolError.
c10::ScalarType checked_dtype(uint8_t number);

// The sizes and strides that come next. ProtocolError when they are no tensor's, or too large to be counted.
Look read_look(Reader& in, uint8_t dtype, uint8_t dimensions, uint8_t flags);

// A View as Put and Get name it.
struct View {
  uint32_t storage = 0;
  int64_t offset = 0;
  Look look;
};
View read_view(Reader& in);

// "float [2, 3]", for messages.
std::string described(c10::ScalarType dtype, c10::IntArrayRef sizes);

// Bytes from the start of its storage to the end of its last element; 0 when it has none.
uint64_t end_bytes(const at::Tensor& tensor);

}  // namespace genie
