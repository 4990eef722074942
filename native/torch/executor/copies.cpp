#include "copies.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace genie {

namespace {

constexpr uint64_t PIECE_BYTES = FRAME_BYTES_MAX;

const uint8_t* memory_of(const at::Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

at::Tensor empty_pinned(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).device(c10::kCPU).pinned_memory(true));
}

}  // namespace

at::Tensor bytes_of(const at::Tensor& contiguous, uint64_t start, uint64_t bytes) {
  uint64_t first = static_cast<uint64_t>(contiguous.storage_offset()) * contiguous.itemsize() + start;
  auto flat = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(contiguous.storage()), contiguous.key_set(), c10::scalarTypeToTypeMeta(at::kByte));
  int64_t size = static_cast<int64_t>(bytes), stride = 1;
  flat.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(size), c10::IntArrayRef(stride),
                                                    static_cast<int64_t>(first));
  return flat;
}

void Copies::each_piece(const at::Tensor& contiguous,
                        const std::function<void(const uint8_t*, size_t)>& take) {
  uint64_t size = contiguous.nbytes();
  if (size == 0) return;
  if (contiguous.device().is_cpu()) {
    take(memory_of(contiguous), size);
    return;
  }
  auto start_copy = [&](uint64_t start) -> Piece& {
    uint64_t bytes = std::min(PIECE_BYTES, size - start);
    Piece& piece = take_piece();
    piece.memory.narrow(0, 0, static_cast<int64_t>(bytes))
        .copy_(bytes_of(contiguous, start, bytes), /*non_blocking=*/true);
    mark(piece);
    return piece;
  };
  Piece* here = &start_copy(0);
  for (uint64_t start = 0; start < size; start += PIECE_BYTES) {
    Piece* next = start + PIECE_BYTES < size ? &start_copy(start + PIECE_BYTES) : nullptr;
    here->copied->synchronize();
    take(memory_of(here->memory), std::min(PIECE_BYTES, size - start));
    here = next;
  }
}

void Copies::read(const at::Tensor& contiguous, uint8_t* into) {
  each_piece(contiguous, [&into](const uint8_t* from, size_t bytes) {
    std::memcpy(into, from, bytes);
    into += bytes;
  });
}

void Copies::write(const at::Tensor& contiguous, const uint8_t* from, size_t bytes) {
  if (bytes == 0) return;
  if (contiguous.device().is_cpu()) {
    std::memcpy(contiguous.mutable_data_ptr(), from, bytes);
    return;
  }
  // Memory of its own, which torch uses again once the copy is done: nobody waits for the accelerator here.
  at::Tensor memory = empty_pinned(bytes);
  std::memcpy(memory.mutable_data_ptr(), from, bytes);
  bytes_of(contiguous, 0, bytes).copy_(memory, /*non_blocking=*/true);
}

uint8_t* Copies::next_piece() { return static_cast<uint8_t*>(take_piece().memory.mutable_data_ptr()); }

void Copies::write_piece(const at::Tensor& contiguous, uint64_t start, size_t bytes) {
  Piece& piece = pieces_[last_];
  bytes_of(contiguous, start, bytes)
      .copy_(piece.memory.narrow(0, 0, static_cast<int64_t>(bytes)), /*non_blocking=*/true);
  mark(piece);
}

Copies::Piece& Copies::take_piece() {
  last_ = 1 - last_;
  Piece& piece = pieces_[last_];
  if (!piece.memory.defined()) {
    piece.memory = empty_pinned(PIECE_BYTES);
    piece.copied.emplace(device_.type());
  }
  piece.copied->synchronize();
  return piece;
}

void Copies::mark(Piece& piece) {
  piece.copied->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void Upload::begin(at::Tensor target, at::Tensor staged, uint64_t bytes) {
  target_ = std::move(target);
  staged_ = std::move(staged);
  left_ = bytes;
  done_ = 0;
}

uint8_t* Upload::place(size_t bytes) {
  if (bytes == 0 || bytes > left_) throw ProtocolError("other bytes came than an upload had announced");
  if (!target_.defined()) {
    thrown_away_.resize(bytes);
    return thrown_away_.data();
  }
  if (!staged_.device().is_cpu()) return copies_.next_piece();
  return static_cast<uint8_t*>(staged_.mutable_data_ptr()) + done_;
}

void Upload::arrived(size_t bytes) {
  left_ -= bytes;
  if (target_.defined() && !staged_.device().is_cpu()) copies_.write_piece(staged_, done_, bytes);
  done_ += bytes;
  if (left_ == 0) finish();
}

void Upload::fill(const uint8_t* from) {
  uint64_t bytes = left_;
  left_ = 0;
  if (target_.defined()) copies_.write(staged_, from, bytes);
  finish();
}

void Upload::finish() {
  at::Tensor target = std::move(target_), staged = std::move(staged_);
  abandon();
  if (!target.is_same(staged)) target.copy_(staged, /*non_blocking=*/true);
}

void Upload::abandon() {
  target_.reset();
  staged_.reset();
  thrown_away_ = std::vector<uint8_t>();
}

}  // namespace genie
