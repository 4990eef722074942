// The op stream between the torch device and an executor: frames, records, templates.
//
// The connection is set up in Python (genie/runtime/opwire.py: preface, ticket). From then on both sides
// speak what is written here, little endian, without padding.
//
// Client to executor: FrameHeader, then `bytes` of payload. Frames are numbered from 1 without gaps over
// the whole session, also across connections: after a cut the client sends again what the executor has not
// received. RECORDS holds whole records; BYTES holds the next part of the upload that a Put began.
//
// Executor to client: ReplyHeader, then `bytes` of payload. Replies are numbered from 1 in the order of the
// records that ask for one (Get, Sync, Ask, GeneratorState, Stats, GraphReport). An executor keeps a reply
// until the client has said in `replies_received` that it has it.
//
// clang-format off
// A record is u32 `kind << 24 | argument`, then its body:
//   Op             argument: template. Data of the arguments in order, then a u32 storage for each new one.
//   Ask            argument: template. Data of the arguments. Replied: the outputs, see below.
//   Bind           argument: count. u64 number of the Ask's reply, u32 storage for each of its new outputs.
//   Template       argument: template. u32 bytes, body (below). Replaces nothing: the number must be free.
//   Forget         argument: template.
//   Allocate       u32 storage, u64 bytes.
//   Free           u32 storage.
//   Resize         u32 storage, u64 bytes. Contents up to the smaller size are kept. Where it is smaller, the
//                  use of a tensor that reaches beyond is a failure, until the storage has its size back.
//   Put            argument 1: the bytes follow in the record; 0: in BYTES frames, which come next, so that
//                  it is the last record of its frame. View, u64 bytes, [bytes].
//   Get            View. Replied: the bytes, contiguous.
//   Sync           Replied: nothing, when everything before has been carried out on the accelerator.
//   Seed           u32 generator, u64 seed.
//   GeneratorState u32 generator. Replied: its state.
//   SetGenerator   u32 generator, u32 bytes, state.
//   FreeGenerator  u32 generator.
//   Stats          Replied: five u64: storages, bytes allocated, peak, quota (0: none), ops run. Argument 1:
//                  from then on the peak is counted anew.
//   GraphBegin     u32 graph. Op, Allocate and Free up to GraphEnd are carried out and also written down.
//                  Only they, Template, Forget, Ask, Bind, GraphStep and Unship may come between, and a
//                  storage that is made there keeps its number for the graph until GraphFree.
//   GraphStep      As Op, but only written down: it was asked just before, and its outputs are known now.
//   GraphEnd       argument 1: the graph is kept; 2: it is kept, and compiled at its first replay if that
//                  can be done; 0: it is forgotten.
//   GraphReplay    u32 graph. What was written down is carried out again, on the same storages. Those that
//                  were still there at GraphEnd are the graph's results, and made anew; the rest come and go.
//                  A storage that it reads and does not make must be there.
//   GraphResult    u32 storage, u32 new storage. The new one has what the first, a graph's result, has now.
//   GraphFree      u32 graph.
//   GraphReport    u32 graph. Replied: u8 ReplayKind, u64 replays, text why it is not replayed in a better
//                  way ("" when nothing is in the way of that).
//   Ship           u64 number, View. A copy of it is put on the shelf, where one other executor may fetch it.
//                  Numbers rise. The shelf then has the copy, or why there is none.
//   Unship         u64 number. What is on the shelf under it, if anything, is dropped.
//   Land           View, u64 bytes, text host, u32 port, text server name, u64 number, text token, text
//                  name of the source (for messages). What another executor ships under the number is
//                  fetched into the view. It is alone in its frame, and the frame counts as received when
//                  that is over: a client that comes back after a cut sends it again. When it fails the
//                  whole storage is poisoned.
//   Goodbye        The client leaves for good. Last record.
// clang-format on
// Generator 0 is the session's default one; others come to life when they are first named.
//
// View: u32 storage, u8 dtype, u8 dimensions, u8 flags, u8 0, i64 offset, i64 sizes..., i64 strides...
// A dtype is torch's c10::ScalarType number; only those of is_carried() may be named.
// Template body: text op name ("aten::add"), text overload, u32 arguments, each as below; u8 1 when outputs
// are predicted (Op) or 0 (Ask); then, when predicted, u32 outputs, each as below.
// text: u32 bytes, UTF-8. An argument is u8 ArgumentKind, then what the kind says; "data" travels with
// each Op. A list holds at most LIST_ITEMS_MAX, and no lists. The numbers of dtypes, layouts and memory
// formats are Integers; the executor holds every argument against the type that the op declares.
//
// One executor fetches from another over a connection of its own, set up as opwire.py says. As soon as it has
// the number on its shelf, the other sends ParcelHeader and `bytes` of contents, or of a failure written as
// in ReplyKind::Error. Whoever has got all of it says so with the one byte PARCEL_TAKEN, and the shelf lets
// it go; without that byte it may be fetched again. What was taken once is not given twice. After the byte
// it may ask for another number on the same connection, in the words of opwire.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace genie {

constexpr uint32_t FRAME_BYTES_MAX = 4u << 20;
constexpr uint32_t INLINE_BYTES_MAX = 64u << 10;
constexpr uint32_t TEMPLATES_MAX = 1u << 16;
// Arguments and outputs of all templates together, those in lists too.
constexpr uint64_t TEMPLATE_NODES_MAX = 2'000'000;
constexpr uint32_t STORAGES_MAX = 1u << 22;
constexpr uint32_t GENERATORS_MAX = 1u << 12;
constexpr uint32_t GRAPHS_MAX = 1u << 12;
constexpr uint32_t GRAPH_STEPS_MAX = 1u << 18;
// What the steps of all graphs take in the executor's memory, records and bookkeeping.
constexpr uint64_t GRAPH_BYTES_MAX = 256u << 20;
constexpr uint32_t DIMENSIONS_MAX = 64;
constexpr uint32_t LIST_ITEMS_MAX = 65536;
constexpr size_t SCALAR_BYTES = 16;  // of the data of a ScalarTensor
constexpr uint32_t TEXT_BYTES_MAX = 4096;
// The executor says how far it is at least every so many frames or bytes; the client holds more than that
// many unacknowledged ones before it waits.
constexpr uint32_t ACKNOWLEDGE_FRAMES = 64;
constexpr uint64_t ACKNOWLEDGE_BYTES = 4u << 20;
constexpr uint32_t UNACKNOWLEDGED_FRAMES_MAX = 1024;
constexpr uint64_t UNACKNOWLEDGED_BYTES_MAX = 32u << 20;
// A client that has asked for so many replies takes some (and says so in a frame) before it asks for more;
// likewise it binds what its Asks gave. More than that is an error.
constexpr uint32_t REPLIES_UNRECEIVED_MAX = 1024;
constexpr uint32_t ASKS_UNBOUND_MAX = 256;
// On a shelf at one time; one Ship more is a failure of that copy.
constexpr uint32_t PARCELS_MAX = 4096;
constexpr uint64_t PARCEL_FAILURE_BYTES_MAX = 4 * TEXT_BYTES_MAX;
constexpr uint8_t PARCEL_TAKEN = 1;
constexpr uint32_t HOST_BYTES_MAX = 255;

enum class FrameKind : uint32_t { Records = 1, Bytes = 2 };

struct FrameHeader {
  uint32_t bytes;
  FrameKind kind;
  uint64_t number;
  uint64_t replies_received;
};
static_assert(sizeof(FrameHeader) == 24);

// Acknowledge has no payload and the number of the last reply. Farewell is an error after which the executor
// closes the session.
enum class ReplyKind : uint32_t { Acknowledge = 0, Reply = 1, Error = 2, Farewell = 3 };

// `frames_received`: the last frame that has arrived whole.
// Payload of Error and Farewell: text code (of errors.py or "device.out_of_memory"), text op, u64 number of
// the op, text message.
struct ReplyHeader {
  uint64_t bytes;
  uint64_t number;
  uint64_t frames_received;
  ReplyKind kind;
  uint32_t reserved;
};
static_assert(sizeof(ReplyHeader) == 32);

enum class ParcelKind : uint32_t { Contents = 0, Failure = 1 };

struct ParcelHeader {
  uint64_t bytes;
  ParcelKind kind;
  uint32_t reserved;
};
static_assert(sizeof(ParcelHeader) == 16);

enum class Record : uint8_t {
  Op = 0,
  Ask = 1,
  Bind = 2,
  Template = 3,
  Forget = 4,
  Allocate = 5,
  Free = 6,
  Resize = 7,
  Put = 8,
  Get = 9,
  Sync = 10,
  Seed = 11,
  GeneratorState = 12,
  SetGenerator = 13,
  FreeGenerator = 14,
  Stats = 15,
  Goodbye = 16,
  GraphBegin = 17,
  GraphEnd = 18,
  GraphReplay = 19,
  GraphFree = 20,
  GraphStep = 21,
  GraphResult = 22,
  GraphReport = 23,
  Ship = 24,
  Land = 25,
  Unship = 26,
};
constexpr uint32_t GRAPH_FORGET = 0, GRAPH_KEEP = 1, GRAPH_COMPILE = 2;  // arguments of GraphEnd
// How an executor replays a graph.
enum class ReplayKind : uint8_t {
  Steps = 0,
  CudaGraph = 1,
  Inductor = 2,
  InductorInCudaGraph = 3,
};
constexpr uint32_t RECORD_ARGUMENT_MAX = (1u << 24) - 1;

enum class ArgumentKind : uint8_t {
  None = 0,
  Tensor = 1,        // u8 dtype, u8 dimensions, u8 flags (VIEW_*), i64 sizes..., i64 strides...;
                     // data: u32 storage, and i64 offset when VIEW_HAS_OFFSET
  ScalarTensor = 2,  // a CPU tensor without dimensions: u8 dtype, u8 1 when it stands for a Python number;
                     // data: 16 bytes
  Undefined = 3,     // a tensor that is not there
  Integer = 4,       // i64
  Boolean = 5,       // u8
  Float = 6,         // f64
  Complex = 7,       // f64, f64
  Text = 8,          // text
  List = 9,          // u32 items, each an argument
  OwnDevice = 10,    // the executor's accelerator
  Generator = 11,    // data: u32 generator
  IntegerData = 12,  // data: i64
  FloatData = 13,    // data: f64
};

constexpr uint8_t VIEW_HAS_OFFSET = 1;
constexpr uint8_t VIEW_CONJUGATE = 2;
constexpr uint8_t VIEW_NEGATIVE = 4;

// In a template (what is predicted) and in the reply to an Ask: u32 outputs, each as here, and in the reply
// then u32 inputs that the op has given another shape or size: u32 index, u64 storage bytes, u8 dimensions,
// i64 offset, i64 sizes..., i64 strides...
enum class OutputKind : uint8_t {
  None = 0,     // no tensor
  New = 1,      // u8 dtype, u8 dimensions, i64 sizes..., i64 strides...; a storage of its own, offset 0
  Same = 2,     // u32 index among the arguments of kind Tensor, in order, those in lists included
  List = 3,     // u32 items, each an output
  Integer = 4,  // i64
  Float = 5,    // f64; only in replies, as are the next two
  Boolean = 6,  // u8
  Complex = 7,  // f64, f64
};

inline bool is_carried(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Bool:
    case c10::ScalarType::Byte:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexHalf:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
    case c10::ScalarType::Float8_e4m3fn:
    case c10::ScalarType::Float8_e5m2:
      return true;
    default:
      return false;
  }
}

// What came over the wire is not what this side allows; the session cannot go on.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Grows as needed; keeps its memory when cleared.
class Writer {
 public:
  const uint8_t* data() const { return bytes_.data(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }

  uint8_t* grow(size_t count) {
    if (size_ + count > bytes_.size()) bytes_.resize((size_ + count) * 2 + 256);
    uint8_t* start = bytes_.data() + size_;
    size_ += count;
    return start;
  }
  void raw(const void* from, size_t count) {
    if (count) std::memcpy(grow(count), from, count);
  }
  template <class T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(grow(sizeof(T)), &value, sizeof(T));
  }
  void u8(uint8_t value) { *grow(1) = value; }
  void u32(uint32_t value) { put(value); }
  void u64(uint64_t value) { put(value); }
  void i64(int64_t value) { put(value); }
  void f64(double value) { put(value); }
  void text(std::string_view value) {
    u32(static_cast<uint32_t>(value.size()));
    raw(value.data(), value.size());
  }
  void overwrite_u32(size_t at, uint32_t value) { std::memcpy(bytes_.data() + at, &value, sizeof value); }
  void record(Record kind, uint32_t argument = 0) { u32(static_cast<uint32_t>(kind) << 24 | argument); }

 private:
  std::vector<uint8_t> bytes_;
  size_t size_ = 0;
};

// Never reads past its end: ProtocolError instead.
class Reader {
 public:
  Reader(const uint8_t* start, size_t size) : next_(start), end_(start + size) {}

  size_t left() const { return static_cast<size_t>(end_ - next_); }
  const uint8_t* take(size_t count) {
    if (count > left()) throw ProtocolError("a record ends before its time");
    const uint8_t* start = next_;
    next_ += count;
    return start;
  }
  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  uint8_t u8() { return *take(1); }
  uint32_t u32() { return get<uint32_t>(); }
  uint64_t u64() { return get<uint64_t>(); }
  int64_t i64() { return get<int64_t>(); }
  double f64() { return get<double>(); }
  std::string text() {
    uint32_t count = u32();
    if (count > TEXT_BYTES_MAX) throw ProtocolError("a text is longer than allowed");
    const uint8_t* start = take(count);
    return std::string(reinterpret_cast<const char*>(start), count);
  }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

}  // namespace genie
