// The part of CUDA that torch's CPU build asks about: with it, tensors without data may say that they lie on cuda:0.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct PretendedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);
}  // namespace c10::impl

namespace at {
struct PretendedHooks final : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

// torch makes its hooks once, while it is imported. They have no data, so the ones that exist are given our functions.
struct Installed {
  PretendedHooks hooks;
  Installed() {
    auto& theirs = const_cast<CUDAHooksInterface&>(detail::getCUDAHooks());
    *reinterpret_cast<void**>(&theirs) = *reinterpret_cast<void**>(&hooks);
  }
};
static Installed* const installed = new Installed;
}  // namespace at
