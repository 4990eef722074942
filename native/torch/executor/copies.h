// Bytes between the client's tensors and this process's memory, in pieces that are copied while others
// travel.
// Not for: sending and receiving them (inbox.h, outbox.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include "../wire.h"

namespace genie {

// Pieces of memory that the accelerator reads and writes by itself, used in turn: two, and more while uploads
// come faster than the accelerator, busy with other work, takes them. On a CPU nothing of this is needed.
class Copies {
 public:
  explicit Copies(c10::Device device) : device_(device) {}

  // Gives the bytes of a contiguous tensor, piece by piece and in order.
  void each_piece(const at::Tensor& contiguous, const std::function<void(const uint8_t*, size_t)>& take);
  // All of them at once.
  void read(const at::Tensor& contiguous, uint8_t* into);

  // A few bytes go to a contiguous tensor; `from` is free again when this returns.
  void write(const at::Tensor& contiguous, const uint8_t* from, size_t bytes);
  // Memory for the next bytes, at most FRAME_BYTES_MAX, that are to go to the accelerator.
  uint8_t* room_for(size_t bytes);
  // What was put there goes to byte `start` of a contiguous tensor; the copy may still be under way.
  void write_from_room(const at::Tensor& contiguous, uint64_t start, size_t bytes);

 private:
  struct Piece {
    at::Tensor memory;
    c10::Event copied;
  };

  Piece& take_piece();
  void mark(Piece& piece);

  c10::Device device_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  size_t last_ = 0;
  Piece* filling_ = nullptr;  // has room after `filled_` bytes
  uint64_t filled_ = 0;
};

// The bytes of a contiguous tensor as a tensor of bytes.
at::Tensor bytes_of(const at::Tensor& contiguous, uint64_t start, uint64_t bytes);

// An upload that a Put has begun. It goes on over several frames, and over several connections.
class Upload {
 public:
  explicit Upload(Copies& copies) : copies_(copies) {}

  bool under_way() const { return left_ > 0; }
  // `target` is undefined when the bytes are to be thrown away. `staged` is contiguous: the target itself, or
  // memory of the same size from which the target is filled at the end.
  void begin(at::Tensor target, at::Tensor staged, uint64_t bytes);
  // Where the next bytes belong; at most FRAME_BYTES_MAX of them. ProtocolError when there are too many.
  uint8_t* place(size_t bytes);
  // They are all there.
  void arrived(size_t bytes);
  // All of it at once.
  void fill(const uint8_t* from);
  // Lets the tensors go; what still comes will be thrown away.
  void abandon();

 private:
  void finish();

  Copies& copies_;
  at::Tensor target_, staged_;
  std::vector<uint8_t> thrown_away_;
  uint64_t left_ = 0;
  uint64_t done_ = 0;
};

}  // namespace genie
