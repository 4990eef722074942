// See generator.h.
#include "generator.h"

#include <ATen/core/TensorBase.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include "errors.h"
#include "roster.h"

namespace genie {

namespace {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr uint32_t DEFAULT = 0;

class RemoteGenerator final : public c10::GeneratorImpl {
 public:
  // Without a connection: the default one of its index.
  RemoteGenerator(int index, ConnectionPtr connection, uint32_t number)
      : c10::GeneratorImpl(c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(index)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        connection_(std::move(connection)),
        number_(number) {}

  ~RemoteGenerator() override {
    if (number_ != DEFAULT) connection_->free_generator(number_);
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    if (number_ == DEFAULT && !roster().open_connection(index())) return;  // it is seeded when it is opened
    write([&](Writer& out) {
      out.record(Record::Seed);
      out.u32(number_);
      out.u64(seed);
    });
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override { raise("device.op_refused", "set_offset: not for remote generators"); }
  uint64_t get_offset() const override {
    raise("device.op_refused", "get_offset: not for remote generators");
  }

  void set_state(const c10::TensorImpl& state) override {
    auto bytes = static_cast<uint64_t>(state.numel()) * state.itemsize();
    if (bytes > INLINE_BYTES_MAX) raise("usage", "this is not the state of a generator: it is too large");
    write([&](Writer& out) {
      out.record(Record::SetGenerator);
      out.u32(number_);
      out.u32(static_cast<uint32_t>(bytes));
      out.raw(state.data(), bytes);
    });
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    ConnectionPtr connection = this->connection();
    connection->check_not_recording("the state of a generator");
    Awaited awaited;
    Connection::Batch batch(*connection);
    batch.records().record(Record::GeneratorState);
    batch.records().u32(number_);
    uint64_t asked = batch.finish_ask(awaited);
    connection->await(asked, awaited);
    at::Tensor state = at::empty({static_cast<int64_t>(awaited.payload.size())}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), awaited.payload.data(), awaited.payload.size());
    return state.getIntrusivePtr();
  }

  bool is_default() const { return number_ == DEFAULT; }
  bool lives_on(const Connection& connection) const { return connection_.get() == &connection; }
  uint32_t number() const { return number_; }

 private:
  int index() const { return device().index(); }
  ConnectionPtr connection() const { return number_ == DEFAULT ? roster().connection(index()) : connection_; }

  template <class Write>
  void write(Write write) {
    ConnectionPtr connection = this->connection();
    connection->check_not_recording("a change of a generator");
    Connection::Batch batch(*connection);
    write(batch.records());
    batch.finish_op();
  }

  RemoteGenerator* clone_impl() const override {
    at::Generator copy = make_generator(index());
    auto* impl = static_cast<RemoteGenerator*>(copy.unsafeGetGeneratorImpl());
    impl->set_state(*get_state());
    impl->seed_ = seed_;
    return static_cast<RemoteGenerator*>(copy.unsafeReleaseGeneratorImpl());
  }

  const ConnectionPtr connection_;
  const uint32_t number_;
  uint64_t seed_ = c10::default_rng_seed_val;
};

}  // namespace

at::Generator make_default_generator(int index) {
  return at::make_generator<RemoteGenerator>(index, ConnectionPtr(), DEFAULT);
}

at::Generator make_generator(int index) {
  ConnectionPtr connection = roster().connection(index);
  uint32_t number;
  {
    Connection::Batch batch(*connection);
    number = batch.new_generator();
  }
  auto made = at::make_generator<RemoteGenerator>(connection->options().index, connection, number);
  made.set_current_seed(c10::default_rng_seed_val);
  return made;
}

uint32_t generator_number(const at::Generator& generator, const Connection& connection) {
  const std::string& here = connection.options().device_name;
  TORCH_CHECK(generator.device().type() == DEVICE_TYPE,
              "Expected a 'remote_accelerator' device type for generator but found '",
              generator.device().type(), "'");
  auto* found = static_cast<RemoteGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(found->device().index() == connection.options().index, "Expected a generator of ", here,
              " but found one of ", found->device());
  if (found->is_default()) return DEFAULT;
  if (!found->lives_on(connection)) raise("device.lost", "the generator lived on an executor that is gone");
  return found->number();
}

}  // namespace genie
