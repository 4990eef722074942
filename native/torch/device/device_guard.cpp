// Implements torch's interfaces of a device type: device guard and PrivateUse1 hooks.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device_type.h"
#include "generator.h"
#include "device_guard.h"
#include "device_registry.h"
#include "storage.h"

namespace genie {

namespace {

// An executor runs ops in order, so there is one stream, and events are always complete.
struct RemoteDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(device_registry().current_device())};
  }
  void setDevice(c10::Device device) const override { device_registry().set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_registry().set_current_device_unchecked(device.index());
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
    return static_cast<c10::DeviceIndex>(device_registry().device_count());
  }
  // An event is the device index + 1, so that it is not null.
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
    if (ConnectionPtr connection = device_registry().find_open_connection(index)) connection->synchronize();
  }
};

struct RemoteDeviceHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_registry().device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return index < device_registry().device_count();
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_registry().device_count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    device_registry().set_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device_registry().current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex old = getCurrentDevice();
    device_registry().set_current_device(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return device_registry().default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(reinterpret_cast<uintptr_t>(pointer) >> 40 & 0xff)};
  }
  // Pinning has no effect for a device behind a network, so ordinary memory is used.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void register_device_guard_and_hooks() {
  static auto* hooks = new RemoteDeviceHooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace genie

using GenieGuard = genie::RemoteDeviceGuard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, GenieGuard)
