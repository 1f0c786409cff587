// The native half of a device: makes tensors and streams, reports memory.
#pragma once

#include <napi.h>

#include <memory>

#include "runtime/device.h"

namespace kv {

class DeviceObject : public Napi::ObjectWrap<DeviceObject> {
 public:
  static Napi::Function define(Napi::Env env);
  static DeviceObject& from(const Napi::Value& value) { return *Unwrap(value.As<Napi::Object>()); }

  // new NativeDevice(kind, index, threads, instruction set name or undefined, memory limit in bytes or 0)
  explicit DeviceObject(const Napi::CallbackInfo& info);

  const std::shared_ptr<Device>& device() const { return device_; }

 private:
  Napi::Value allocate(const Napi::CallbackInfo& info);
  Napi::Value wrap(const Napi::CallbackInfo& info);
  Napi::Value create_stream(const Napi::CallbackInfo& info);
  Napi::Value memory(const Napi::CallbackInfo& info);
  Napi::Value instruction_set(const Napi::CallbackInfo& info);
  Napi::Value name(const Napi::CallbackInfo& info);

  std::shared_ptr<Device> device_;
};

}  // namespace kv
