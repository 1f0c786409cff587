// The native half of a device: makes tensors and streams, reports memory.
#pragma once

#include <napi.h>

#include <memory>

#include "bindings/native-object.h"
#include "runtime/device.h"

namespace kv {

class DeviceObject : public NativeObject<DeviceObject> {
 public:
  static constexpr char kName[] = "native device";
  static constexpr napi_type_tag kTag = {0x6b762d6465766963, 0xe15b7742a90d36c8};

  static Napi::Function define(Napi::Env env);

  // new NativeDevice(kind, index, threads, instruction set name or undefined, memory limit in bytes or 0)
  explicit DeviceObject(const Napi::CallbackInfo& info);

  const std::shared_ptr<Device>& device() const { return device_; }

 private:
  Napi::Value allocate(const Napi::CallbackInfo& info);
  Napi::Value wrap(const Napi::CallbackInfo& info);
  Napi::Value host_pool(const Napi::CallbackInfo& info);
  Napi::Value create_stream(const Napi::CallbackInfo& info);
  Napi::Value memory(const Napi::CallbackInfo& info);
  Napi::Value instruction_set(const Napi::CallbackInfo& info);
  Napi::Value memory_reading(const Napi::CallbackInfo& info);
  Napi::Value name(const Napi::CallbackInfo& info);

  std::shared_ptr<Device> device_;
};

}  // namespace kv
