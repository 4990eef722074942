// What torch asks of a device type: how many devices, which is current, how to wait, where generators are.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"
#include "guard.h"
#include "roster.h"
#include "storage.h"

namespace genie {

namespace {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;

// An executor carries out what it is sent in order: there is one stream, and events are done when asked.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(roster().current())};
  }
  void setDevice(c10::Device device) const override { roster().set_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    roster().set_current_unchecked(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(roster().count());
  }
  // An event is the index of its device, and one more so that it is not null.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(static_cast<intptr_t>(stream.device_index()) + 1);
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronizeDevice(static_cast<c10::DeviceIndex>(reinterpret_cast<intptr_t>(event) - 1));
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronizeDevice(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (ConnectionPtr connection = roster().open_connection(index)) connection->synchronize();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return roster().count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return index < roster().count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(roster().count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { roster().set_current(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(roster().current());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex old = getCurrentDevice();
    roster().set_current(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return roster().default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(reinterpret_cast<uintptr_t>(pointer) >> 40 & 0xff)};
  }
  // Nothing is pinned for a device behind a network; ordinary memory does.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void register_hooks() {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace genie

using GenieGuard = genie::Guard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, GenieGuard)
