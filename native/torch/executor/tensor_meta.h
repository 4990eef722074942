// Metadata of a tensor: dtype, sizes, strides, lazy conjugate and negative bits. Read from the wire and
// validated. Which memory it refers to is in storage_table.h.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include "../wire.h"

namespace genie {

// Maximum storage offset in elements; larger than any memory, and its byte count fits an int64_t.
constexpr int64_t OFFSET_MAX = int64_t{1} << 56;

struct TensorMeta {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint8_t flags = 0;  // VIEW_CONJUGATE, VIEW_NEGATIVE
  c10::SmallVector<int64_t, 5> sizes, strides;
  uint64_t item_bytes = 0;
  uint64_t content_bytes = 0;  // of all elements when contiguous
  uint64_t span_bytes = 0;     // from the first element to the end of the last; 0 if there are none

  bool matches(const at::Tensor& tensor, int64_t offset) const {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return impl.storage_offset() == offset && impl.dtype().toScalarType() == dtype &&
           impl.sizes() == c10::IntArrayRef(sizes) && impl.strides() == c10::IntArrayRef(strides) &&
           impl.is_conj() == ((flags & VIEW_CONJUGATE) != 0) &&
           impl.is_neg() == ((flags & VIEW_NEGATIVE) != 0);
  }
};

// ProtocolError unless is_supported_dtype().
c10::ScalarType to_supported_dtype(uint8_t number);

// Reads sizes and strides. ProtocolError if they are invalid, or if the byte count overflows.
TensorMeta read_tensor_meta(WireReader& in, uint8_t dtype, uint8_t dimensions, uint8_t flags);

// A View of wire.h.
struct StorageView {
  uint32_t storage = 0;
  int64_t offset = 0;
  TensorMeta meta;
};
StorageView read_storage_view(WireReader& in);

// "[2, 3]" and "Float [2, 3]", for messages.
std::string describe_sizes(c10::IntArrayRef sizes);
std::string describe_tensor(c10::ScalarType dtype, c10::IntArrayRef sizes);

// Bytes from the start of the storage to the end of the last element; 0 if there are no elements.
uint64_t storage_end_bytes(const at::Tensor& tensor);

}  // namespace genie
