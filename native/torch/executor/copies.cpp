#include "copies.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace genie {

namespace {

constexpr uint64_t PIECE_BYTES = FRAME_BYTES_MAX;
// Small enough that the first part is on its way soon, large enough that starting a copy costs little.
constexpr uint64_t DOWNLOAD_BYTES = 1u << 20;
constexpr size_t PIECES_MIN = 2;
constexpr size_t PIECES_MAX = 16;

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
  filling_ = nullptr;
  auto start_copy = [&](uint64_t start) -> Piece& {
    uint64_t bytes = std::min(DOWNLOAD_BYTES, size - start);
    Piece& piece = take_piece();
    piece.memory.narrow(0, 0, static_cast<int64_t>(bytes))
        .copy_(bytes_of(contiguous, start, bytes), /*non_blocking=*/true);
    mark(piece);
    return piece;
  };
  Piece* here = &start_copy(0);
  for (uint64_t start = 0; start < size; start += DOWNLOAD_BYTES) {
    Piece* next = start + DOWNLOAD_BYTES < size ? &start_copy(start + DOWNLOAD_BYTES) : nullptr;
    here->copied.synchronize();
    take(memory_of(here->memory), std::min(DOWNLOAD_BYTES, size - start));
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
  std::memcpy(room_for(bytes), from, bytes);
  write_from_room(contiguous, 0, bytes);
}

uint8_t* Copies::room_for(size_t bytes) {
  if (!filling_ || filled_ + bytes > PIECE_BYTES) {
    filling_ = &take_piece();
    filled_ = 0;
  }
  return static_cast<uint8_t*>(filling_->memory.mutable_data_ptr()) + filled_;
}

void Copies::write_from_room(const at::Tensor& contiguous, uint64_t start, size_t bytes) {
  auto from = filling_->memory.narrow(0, static_cast<int64_t>(filled_), static_cast<int64_t>(bytes));
  bytes_of(contiguous, start, bytes).copy_(from, /*non_blocking=*/true);
  filled_ += bytes;
  mark(*filling_);
}

// Never the one that was taken last: the caller may still read it. One that is still in use is waited for
// only when there are enough.
Copies::Piece& Copies::take_piece() {
  size_t next = pieces_.empty() ? 0 : (last_ + 1) % pieces_.size();
  bool more = pieces_.size() < PIECES_MIN || (pieces_.size() < PIECES_MAX && !pieces_[next]->copied.query());
  if (more) {
    next = pieces_.empty() ? 0 : last_ + 1;
    auto made = std::make_unique<Piece>(Piece{empty_pinned(PIECE_BYTES), c10::Event(device_.type())});
    pieces_.insert(pieces_.begin() + static_cast<std::ptrdiff_t>(next), std::move(made));
  }
  last_ = next;
  Piece& piece = *pieces_[next];
  piece.copied.synchronize();
  return piece;
}

void Copies::mark(Piece& piece) {
  piece.copied.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
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
  if (!staged_.device().is_cpu()) return copies_.room_for(bytes);
  return static_cast<uint8_t*>(staged_.mutable_data_ptr()) + done_;
}

void Upload::arrived(size_t bytes) {
  left_ -= bytes;
  if (target_.defined() && !staged_.device().is_cpu()) copies_.write_from_room(staged_, done_, bytes);
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
