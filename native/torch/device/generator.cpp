// See generator.h.
#include "generator.h"

#include <atomic>

#include <ATen/core/TensorBase.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include "device_type.h"
#include "errors.h"
#include "device_registry.h"
#include "recurrent.h"

namespace genie {

namespace {

constexpr uint32_t DEFAULT_GENERATOR_NUMBER = 0;

// Callers hold the generator's mutex. Waiting for an executor releases the GIL; another thread that then
// takes the GIL may want the mutex, which would deadlock. So the mutex is released here. It protects nothing:
// the state is on the executor.
class MutexRelease {
 public:
  explicit MutexRelease(std::mutex& mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~MutexRelease() { mutex_.lock(); }
  MutexRelease(const MutexRelease&) = delete;
  MutexRelease& operator=(const MutexRelease&) = delete;

 private:
  std::mutex& mutex_;
};

// Virtual functions are called with mutex_ held.
class RemoteGenerator final : public c10::GeneratorImpl {
 public:
  // Without a connection: the default generator of the index.
  RemoteGenerator(int index, ConnectionPtr connection, uint32_t number)
      : c10::GeneratorImpl(c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(index)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        connection_(std::move(connection)),
        number_(number) {}

  ~RemoteGenerator() override {
    if (number_ != DEFAULT_GENERATOR_NUMBER) connection_->free_generator(number_);
  }

  void set_current_seed(uint64_t seed) override {
    MutexRelease release(mutex_);
    send_seed(seed);
  }
  uint64_t current_seed() const override { return last_seed_; }
  uint64_t seed() override {
    MutexRelease release(mutex_);
    uint64_t seed = c10::detail::getNonDeterministicRandom();
    send_seed(seed);
    return seed;
  }
  void set_offset(uint64_t) override {
    raise_python_error("device.op_refused", "set_offset is not supported for remote generators");
  }
  uint64_t get_offset() const override {
    raise_python_error("device.op_refused", "get_offset is not supported for remote generators");
  }

  void set_state(const c10::TensorImpl& state) override {
    MutexRelease release(mutex_);
    send_state(state.data(), static_cast<uint64_t>(state.numel()) * state.itemsize());
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    MutexRelease release(const_cast<std::mutex&>(mutex_));  // const by torch's signature
    std::vector<uint8_t> found = fetch_state();
    at::Tensor state = at::empty({static_cast<int64_t>(found.size())}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), found.data(), found.size());
    return state.getIntrusivePtr();
  }

  // The functions below are called without the mutex.
  void send_seed(uint64_t seed) {
    last_seed_ = seed;
    if (number_ == DEFAULT_GENERATOR_NUMBER) reset_cudnn_dropout(index());
    if (number_ == DEFAULT_GENERATOR_NUMBER && !device_registry().find_open_connection(index()))
      return;  // seeded when the connection is opened
    send_record([&](WireWriter& out) {
      out.begin_record(RecordKind::Seed);
      out.write_u32(number_);
      out.write_u64(seed);
    });
  }

  void send_state(const void* state, uint64_t bytes) {
    if (bytes > INLINE_UPLOAD_BYTES_MAX)
      raise_python_error("usage", "this is not a generator state: it is too large");
    send_record([&](WireWriter& out) {
      out.begin_record(RecordKind::SetGenerator);
      out.write_u32(number_);
      out.write_u32(static_cast<uint32_t>(bytes));
      out.append_bytes(state, bytes);
    });
  }

  std::vector<uint8_t> fetch_state() const {
    ConnectionPtr connection = this->connection();
    connection->check_not_recording("reading a generator state");
    PendingReply reply;
    Connection::LockedRecordWriter writer(*connection);
    writer.records().begin_record(RecordKind::GeneratorState);
    writer.records().write_u32(number_);
    uint64_t number = writer.finish_record_and_request_reply(reply);
    connection->wait_for_reply(number, reply);
    return std::move(reply.payload);
  }

  bool is_default() const { return number_ == DEFAULT_GENERATOR_NUMBER; }
  bool is_on_connection(const Connection& connection) const { return connection_.get() == &connection; }
  uint32_t number() const { return number_; }

 private:
  int index() const { return device().index(); }
  ConnectionPtr connection() const {
    return number_ == DEFAULT_GENERATOR_NUMBER ? device_registry().get_or_open_connection(index())
                                               : connection_;
  }

  template <class Write>
  void send_record(Write write) {
    ConnectionPtr connection = this->connection();
    connection->check_not_recording("changing a generator");
    Connection::LockedRecordWriter writer(*connection);
    write(writer.records());
    writer.finish_record();
  }

  RemoteGenerator* clone_impl() const override {
    MutexRelease release(const_cast<std::mutex&>(mutex_));
    at::Generator copy = make_generator(index());
    auto* impl = static_cast<RemoteGenerator*>(copy.unsafeGetGeneratorImpl());
    std::vector<uint8_t> state = fetch_state();
    impl->send_state(state.data(), state.size());
    impl->last_seed_ = last_seed_.load();
    return static_cast<RemoteGenerator*>(copy.unsafeReleaseGeneratorImpl());
  }

  const ConnectionPtr connection_;
  const uint32_t number_;
  std::atomic<uint64_t> last_seed_ = c10::default_rng_seed_val;
};

}  // namespace

at::Generator make_default_generator(int index) {
  return at::make_generator<RemoteGenerator>(index, ConnectionPtr(), DEFAULT_GENERATOR_NUMBER);
}

at::Generator make_generator(int index) {
  ConnectionPtr connection = device_registry().get_or_open_connection(index);
  uint32_t number;
  {
    Connection::LockedRecordWriter writer(*connection);
    number = writer.assign_generator_number();
  }
  auto made = at::make_generator<RemoteGenerator>(connection->options().device_index, connection, number);
  static_cast<RemoteGenerator*>(made.unsafeGetGeneratorImpl())->send_seed(c10::default_rng_seed_val);
  return made;
}

uint32_t check_and_get_generator_number(const at::Generator& generator, const Connection& connection) {
  const std::string& here = connection.options().device_name;
  TORCH_CHECK(generator.device().type() == DEVICE_TYPE,
              "Expected a 'remote_accelerator' device type for generator but found '",
              generator.device().type(), "'");
  auto* found = static_cast<RemoteGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(found->device().index() == connection.options().device_index, "Expected a generator of ", here,
              " but found one of ", found->device());
  if (found->is_default()) return DEFAULT_GENERATOR_NUMBER;
  if (!found->is_on_connection(connection))
    raise_python_error("device.lost", "the generator was on an executor that was lost");
  return found->number();
}

}  // namespace genie
