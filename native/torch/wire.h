// The op stream between the torch device and an executor: frames, records, templates, replies. Both sides
// include this file; limits and message layouts are defined here only.
//
// The handshake is in Python (genie/runtime/device_protocol.py: preface, ticket). After it both sides speak
// the protocol of this file: little endian, without padding.
//
// Client to executor: FrameHeader, then `bytes` of payload. Frames are numbered from 1 without gaps over the
// whole session, across connections: after a reconnect the client resends what the executor has not received.
// RECORDS holds whole records; BYTES holds the next part of the upload that a Put began.
//
// Executor to client: ReplyHeader, then `bytes` of payload. Replies are numbered from 1 in the order of the
// records that request one (Get, Sync, DynamicOp, GeneratorState, Stats, GraphReport). An executor keeps a
// reply until the client has acknowledged it in `replies_received`.
//
// clang-format off
// A record is u32 `kind << 24 | argument`, then its body:
//   Op             argument: template. Data of the arguments in order, then a u32 storage per new output.
//   DynamicOp      argument: template. Data of the arguments. Reply: the outputs, see OutputKind.
//   BindOutputs    argument: count. u64 number of the DynamicOp's reply, u32 storage for each of its new
//                  outputs.
//   DefineTemplate argument: template. u32 bytes, body (below). The number must be free.
//   DropTemplate   argument: template.
//   Allocate       u32 storage, u64 bytes.
//   Free           u32 storage.
//   Resize         u32 storage, u64 bytes. Contents up to the smaller size are kept. After shrinking, using a
//                  tensor that exceeds the storage fails until the storage has its size back.
//   Put            argument 1: the bytes follow in the record; 0: in BYTES frames, which come next, so that
//                  it is the last record of its frame. View, u64 bytes, [bytes].
//   Get            View. Reply: the bytes, contiguous.
//   Sync           Reply: empty, when all earlier records have completed on the accelerator.
//   Seed           u32 generator, u64 seed.
//   GeneratorState u32 generator. Reply: its state.
//   SetGenerator   u32 generator, u32 bytes, state.
//   FreeGenerator  u32 generator.
//   Stats          Reply: StatsReply. Argument 1: reset the peak afterwards.
//   GraphBegin     u32 graph. Op, Allocate, Free and Settings up to GraphEnd are executed and also recorded.
//                  Only they, DefineTemplate, DropTemplate, DynamicOp, BindOutputs, GraphStep and DropParcel may
//                  come between; a storage that is created there keeps its number for the graph until GraphFree.
//   GraphStep      As Op, but only recorded: it ran just before as a DynamicOp, and its outputs are known.
//   GraphEnd       argument: GRAPH_DISCARD, GRAPH_KEEP, or GRAPH_COMPILE: keep, and compile at the first
//                  replay if possible.
//   GraphReplay    u32 graph. The recorded ops run again, on the same storages. Storages that still existed
//                  at GraphEnd are the graph's results and are created anew; the others are temporary. A storage
//                  that it reads and does not create must exist.
//   GraphResult    u32 storage, u32 new storage. The new one gets the current contents of the first, which is
//                  a result of a graph.
//   GraphFree      u32 graph.
//   GraphReport    u32 graph. Reply: u8 ReplayKind, u64 replays, text: why no faster kind is used ("" if the
//                  fastest is).
//   PublishParcel  u64 number, View. A copy is kept as a parcel, which one other executor may fetch. Numbers
//                  rise. If the copy fails, the parcel holds the error.
//   DropParcel     u64 number. Drops the parcel of this number, if there is one.
//   FetchParcel    View, u64 bytes, ParcelOrigin. Fetches the parcel from the other executor into the view.
//                  It is alone in its frame, and the frame counts as received when the fetch has ended: after a
//                  reconnect the client sends it again. When it fails, the whole storage is poisoned.
//   Settings       Settings (settings.h) for the ops that follow; before the first one, those of the executor's
//                  process. A graph keeps the settings of its recording.
//   CloseSession   The client ends the session. Last record.
// clang-format on
// Generator 0 is the session's default generator; others are created when they are first named.
//
// View: u32 storage, u8 dtype, u8 dimensions, u8 flags, u8 0, i64 offset, i64 sizes..., i64 strides...
// A dtype is torch's c10::ScalarType number; only those of is_supported_dtype() may be named.
// Template body: text op name ("aten::add"), text overload, u32 arguments, each as in ArgumentKind; u8 1 if
// the outputs are predicted (Op) or 0 (DynamicOp); if predicted, u32 outputs, each as in OutputKind. text:
// u32 bytes, UTF-8. An argument is u8 ArgumentKind, then what the kind defines; "data" is sent with each Op.
// A list holds at most LIST_ITEMS_MAX items, and no lists. The numbers of dtypes, layouts and memory formats
// are Integers; the executor checks every argument against the schema of the op.
//
// An executor fetches a parcel from another one over a separate connection, set up as in device_protocol.py.
// As soon as the parcel exists, the other sends TensorParcelHeader and `bytes` of contents, or of a
// RemoteError. The receiver acknowledges it with the byte PARCEL_ACKNOWLEDGED, and the parcel is dropped;
// without that byte it can be fetched again. An acknowledged parcel is not sent twice. After the byte the
// receiver may send another Fetch on the same connection.
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
constexpr uint32_t INLINE_UPLOAD_BYTES_MAX = 64u << 10;
constexpr uint32_t TEMPLATES_MAX = 1u << 16;
// Arguments and outputs of all templates together, including those in lists.
constexpr uint64_t TEMPLATE_ENTRIES_MAX = 2'000'000;
constexpr uint32_t STORAGES_MAX = 1u << 22;
constexpr uint32_t GENERATORS_MAX = 1u << 12;
constexpr uint32_t GRAPHS_MAX = 1u << 12;
constexpr uint32_t GRAPH_STEPS_MAX = 1u << 18;
// Memory of the recorded steps of all graphs in the executor, with bookkeeping.
constexpr uint64_t GRAPH_STEPS_BYTES_MAX = 256u << 20;
constexpr uint32_t DIMENSIONS_MAX = 64;
constexpr uint32_t LIST_ITEMS_MAX = 65536;
constexpr size_t SCALAR_TENSOR_BYTES = 16;  // data of a ScalarTensor
constexpr uint32_t TEXT_BYTES_MAX = 4096;
// The executor acknowledges at least once per ACKNOWLEDGE_INTERVAL_FRAMES frames or
// ACKNOWLEDGE_INTERVAL_BYTES bytes. The client's window, UNACKNOWLEDGED_*_MAX, is larger.
constexpr uint32_t ACKNOWLEDGE_INTERVAL_FRAMES = 64;
constexpr uint64_t ACKNOWLEDGE_INTERVAL_BYTES = 4u << 20;
constexpr uint32_t UNACKNOWLEDGED_FRAMES_MAX = 1024;
constexpr uint64_t UNACKNOWLEDGED_BYTES_MAX = 32u << 20;
// Replies that the client may leave unacknowledged, and DynamicOps that it may leave unbound. More is an
// error.
constexpr uint32_t UNRECEIVED_REPLIES_MAX = 1024;
constexpr uint32_t UNBOUND_REPLIES_MAX = 256;
// Parcels that one executor keeps at a time; publishing more fails that copy.
constexpr uint32_t PARCELS_MAX = 4096;
constexpr uint64_t PARCEL_FAILURE_BYTES_MAX = 4 * TEXT_BYTES_MAX;
constexpr uint8_t PARCEL_ACKNOWLEDGED = 1;
constexpr uint32_t HOST_NAME_BYTES_MAX = 255;

enum class FrameKind : uint32_t { Records = 1, Bytes = 2 };

struct FrameHeader {
  uint32_t bytes;
  FrameKind kind;
  uint64_t number;
  uint64_t replies_received;
};
static_assert(sizeof(FrameHeader) == 24);

// Acknowledge has no payload, and the number of the last reply. After Fatal the executor closes the session.
// The payload of Error and Fatal is a RemoteError.
enum class ReplyKind : uint32_t { Acknowledge = 0, Reply = 1, Error = 2, Fatal = 3 };

// `frames_received`: number of the last frame that has arrived completely.
struct ReplyHeader {
  uint64_t bytes;
  uint64_t number;
  uint64_t frames_received;
  ReplyKind kind;
  uint32_t reserved;
};
static_assert(sizeof(ReplyHeader) == 32);

enum class ParcelKind : uint32_t { Contents = 0, Failure = 1 };

// Precedes the tensor data that one executor sends to another.
struct TensorParcelHeader {
  uint64_t bytes;
  ParcelKind kind;
  uint32_t reserved;
};
static_assert(sizeof(TensorParcelHeader) == 16);

enum class RecordKind : uint8_t {
  Op = 0,
  DynamicOp = 1,
  BindOutputs = 2,
  DefineTemplate = 3,
  DropTemplate = 4,
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
  CloseSession = 16,
  GraphBegin = 17,
  GraphEnd = 18,
  GraphReplay = 19,
  GraphFree = 20,
  GraphStep = 21,
  GraphResult = 22,
  GraphReport = 23,
  PublishParcel = 24,
  FetchParcel = 25,
  DropParcel = 26,
  Settings = 27,
};
constexpr uint32_t GRAPH_DISCARD = 0, GRAPH_KEEP = 1, GRAPH_COMPILE = 2;  // arguments of GraphEnd
// How an executor replays a graph.
enum class ReplayKind : uint8_t {
  Steps = 0,
  CudaGraph = 1,
  Inductor = 2,
  InductorInCudaGraph = 3,
};
// The names in genie.device's GraphReport, by ReplayKind.
constexpr const char* REPLAY_KIND_NAMES[] = {"steps", "cuda graph", "inductor", "inductor in a cuda graph"};
constexpr uint32_t RECORD_ARGUMENT_MAX = (1u << 24) - 1;

enum class ArgumentKind : uint8_t {
  None = 0,
  Tensor = 1,        // u8 dtype, u8 dimensions, u8 flags (VIEW_*), i64 sizes..., i64 strides...;
                     // data: u32 storage, and i64 offset when VIEW_HAS_OFFSET
  ScalarTensor = 2,  // a CPU tensor without dimensions: u8 dtype, u8 1 if it wraps a Python number;
                     // data: 16 bytes
  Undefined = 3,     // an undefined tensor
  Integer = 4,       // i64
  Boolean = 5,       // u8
  Float = 6,         // f64
  Complex = 7,       // f64, f64
  Text = 8,          // text
  List = 9,          // u32 items, each an argument
  Device = 10,       // the executor's accelerator
  Generator = 11,    // data: u32 generator
  IntegerData = 12,  // data: i64
  FloatData = 13,    // data: f64
};

constexpr uint8_t VIEW_HAS_OFFSET = 1;
constexpr uint8_t VIEW_CONJUGATE = 2;
constexpr uint8_t VIEW_NEGATIVE = 4;

// In a template (predicted) and in the reply to a DynamicOp: u32 outputs, each as here. In the reply then u32
// inputs that the op has resized: u32 index, u64 storage bytes, u8 dimensions, i64 offset, i64 sizes..., i64
// strides...
enum class OutputKind : uint8_t {
  None = 0,     // no tensor
  New = 1,      // u8 dtype, u8 dimensions, i64 sizes..., i64 strides...; a new storage, offset 0
  Alias = 2,    // u32 index among the arguments of kind Tensor, in order, those in lists included
  List = 3,     // u32 items, each an output
  Integer = 4,  // i64
  Float = 5,    // f64; only in replies, as are the next two
  Boolean = 6,  // u8
  Complex = 7,  // f64, f64
};

inline bool is_supported_dtype(c10::ScalarType type) {
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
    case c10::ScalarType::Float8_e4m3fnuz:
    case c10::ScalarType::Float8_e5m2fnuz:
    case c10::ScalarType::Float8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

// The peer violated the protocol; the session cannot continue.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Grows as needed; keeps its memory when cleared.
class WireWriter {
 public:
  const uint8_t* data() const { return bytes_.data(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }

  uint8_t* append_uninitialized(size_t count) {
    if (size_ + count > bytes_.size()) bytes_.resize((size_ + count) * 2 + 256);
    uint8_t* start = bytes_.data() + size_;
    size_ += count;
    return start;
  }
  void append_bytes(const void* from, size_t count) {
    if (count) std::memcpy(append_uninitialized(count), from, count);
  }
  template <class T>
  void append_value(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(append_uninitialized(sizeof(T)), &value, sizeof(T));
  }
  void write_u8(uint8_t value) { *append_uninitialized(1) = value; }
  void write_u32(uint32_t value) { append_value(value); }
  void write_u64(uint64_t value) { append_value(value); }
  void write_i64(int64_t value) { append_value(value); }
  void write_f64(double value) { append_value(value); }
  void write_text(std::string_view value) {
    write_u32(static_cast<uint32_t>(value.size()));
    append_bytes(value.data(), value.size());
  }
  void overwrite_u32(size_t at, uint32_t value) { std::memcpy(bytes_.data() + at, &value, sizeof value); }
  void begin_record(RecordKind kind, uint32_t argument = 0) {
    write_u32(static_cast<uint32_t>(kind) << 24 | argument);
  }

 private:
  std::vector<uint8_t> bytes_;
  size_t size_ = 0;
};

// Throws ProtocolError instead of reading past its end.
class WireReader {
 public:
  WireReader(const uint8_t* start, size_t size) : next_(start), end_(start + size) {}

  size_t remaining() const { return static_cast<size_t>(end_ - next_); }
  const uint8_t* consume(size_t count) {
    if (count > remaining()) throw ProtocolError("a record is truncated");
    const uint8_t* start = next_;
    next_ += count;
    return start;
  }
  template <class T>
  T read_value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, consume(sizeof(T)), sizeof(T));
    return value;
  }
  uint8_t read_u8() { return *consume(1); }
  uint32_t read_u32() { return read_value<uint32_t>(); }
  uint64_t read_u64() { return read_value<uint64_t>(); }
  int64_t read_i64() { return read_value<int64_t>(); }
  double read_f64() { return read_value<double>(); }
  std::string read_text() {
    uint32_t count = read_u32();
    if (count > TEXT_BYTES_MAX) throw ProtocolError("a text is longer than allowed");
    const uint8_t* start = consume(count);
    return std::string(reinterpret_cast<const char*>(start), count);
  }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

// Error codes that are not in genie/errors.py: the client raises torch's exception of that kind.
namespace error_code {
constexpr const char* OUT_OF_MEMORY = "device.out_of_memory";
constexpr const char* INDEX_ERROR = "remote.IndexError";
constexpr const char* VALUE_ERROR = "remote.ValueError";
constexpr const char* TYPE_ERROR = "remote.TypeError";
constexpr const char* NOT_IMPLEMENTED_ERROR = "remote.NotImplementedError";
constexpr const char* LINALG_ERROR = "remote.LinAlgError";
}  // namespace error_code

// text code (of genie/errors.py, or error_code), text op, u64 number of the op, text message.
struct RemoteError {
  std::string code;
  std::string op;
  uint64_t number = 0;
  std::string message;
};

inline void write_remote_error(WireWriter& out, const RemoteError& error) {
  out.write_text(error.code);
  out.write_text(error.op);
  out.write_u64(error.number);
  out.write_text(error.message);
}

inline RemoteError read_remote_error(WireReader& in) {
  RemoteError error;
  error.code = in.read_text();
  error.op = in.read_text();
  error.number = in.read_u64();
  error.message = in.read_text();
  return error;
}

// `bytes_max`: the quota; 0: none.
struct StatsReply {
  uint64_t storages, bytes_allocated, bytes_allocated_peak, bytes_max, ops;
};
static_assert(sizeof(StatsReply) == 40);

// Where a parcel is: text host, u32 port, text server name, u64 number, text token, text name of the source.
struct ParcelOrigin {
  std::string host;
  uint32_t port = 0;
  std::string server_name;
  uint64_t number = 0;
  std::string token;
  std::string source;  // for error messages
};

inline void write_parcel_origin(WireWriter& out, const ParcelOrigin& origin) {
  out.write_text(origin.host);
  out.write_u32(origin.port);
  out.write_text(origin.server_name);
  out.write_u64(origin.number);
  out.write_text(origin.token);
  out.write_text(origin.source);
}

// ProtocolError if it is not an address.
inline ParcelOrigin read_parcel_origin(WireReader& in) {
  auto bounded_text = [&in] {
    std::string text = in.read_text();
    if (text.size() > HOST_NAME_BYTES_MAX) throw ProtocolError("an address is longer than allowed");
    return text;
  };
  ParcelOrigin origin;
  origin.host = bounded_text();
  origin.port = in.read_u32();
  if (origin.port == 0 || origin.port > 65535) throw ProtocolError("a port is out of range");
  origin.server_name = bounded_text();
  origin.number = in.read_u64();
  origin.token = bounded_text();
  origin.source = bounded_text();
  return origin;
}

}  // namespace genie
