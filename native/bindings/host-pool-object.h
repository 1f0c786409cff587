// The native half of a host pool.
#pragma once

#include <napi.h>

#include <memory>

#include "bindings/native-object.h"
#include "runtime/host-pool.h"

namespace kv {

class HostPoolObject : public NativeObject<HostPoolObject> {
 public:
  static constexpr char kName[] = "native host pool";
  static constexpr napi_type_tag kTag = {0x6b762d686f737470, 0x5ce80f3d7a1964b2};

  static Napi::Function define(Napi::Env env);
  // Throws a JavaScript error when the device refuses that much. No memory is made yet.
  static Napi::Object create(Napi::Env env, std::shared_ptr<Device> device, double bytes);

  explicit HostPoolObject(const Napi::CallbackInfo& info) : NativeObject<HostPoolObject>(info) {}
  ~HostPoolObject() override;

 private:
  Napi::Value make_slab(const Napi::CallbackInfo& info);
  Napi::Value take(const Napi::CallbackInfo& info);
  Napi::Value available(const Napi::CallbackInfo& info);
  Napi::Value release(const Napi::CallbackInfo& info);
  // Throws a JavaScript error when the pool was released.
  HostPool& pool(Napi::Env env) const;

  std::shared_ptr<HostPool> pool_;
};

}  // namespace kv
