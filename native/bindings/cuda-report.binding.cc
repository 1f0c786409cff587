#include "runtime/cuda-device.h"

#include <napi.h>

namespace kv {

// cudaReport(): { built, reason, devices: [{ name, computeCapability, multiprocessors, memory }] }
Napi::Value cuda_report(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const CudaReport report = cuda_report();
  Napi::Array devices = Napi::Array::New(env, report.devices.size());
  for (uint32_t index = 0; index < report.devices.size(); ++index) {
    const CudaDeviceFacts& facts = report.devices[index];
    Napi::Object device = Napi::Object::New(env);
    device.Set("name", facts.name);
    device.Set("computeCapability", std::to_string(facts.major) + "." + std::to_string(facts.minor));
    device.Set("multiprocessors", facts.multiprocessors);
    device.Set("memory", static_cast<double>(facts.memory));
    devices.Set(index, device);
  }
  Napi::Object object = Napi::Object::New(env);
  object.Set("built", report.built);
  object.Set("reason", report.reason);
  object.Set("devices", devices);
  return object;
}

}  // namespace kv
