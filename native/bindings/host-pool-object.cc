#include "bindings/host-pool-object.h"

#include <utility>

#include "bindings/environment.h"
#include "bindings/errors.h"
#include "bindings/tensor-object.h"

namespace kv {
namespace {

class MakeSlab : public Napi::AsyncWorker {
 public:
  MakeSlab(Napi::Env env, std::shared_ptr<HostPool> pool)
      : Napi::AsyncWorker(env), pool_(std::move(pool)), deferred_(env) {}

  Napi::Promise promise() const { return deferred_.Promise(); }

 protected:
  void Execute() override {
    status_ = pool_->make_slab();
    made_ = pool_->made();
  }

  void OnOK() override {
    if (!status_.ok()) return deferred_.Reject(make_error(Env(), status_).Value());
    deferred_.Resolve(Napi::Number::New(Env(), static_cast<double>(made_)));
  }

 private:
  std::shared_ptr<HostPool> pool_;
  Napi::Promise::Deferred deferred_;
  Status status_;
  size_t made_ = 0;
};

}  // namespace

Napi::Function HostPoolObject::define(Napi::Env env) {
  return DefineClass(
      env, "NativeHostPool",
      {InstanceMethod<&HostPoolObject::make_slab>("makeSlab"), InstanceMethod<&HostPoolObject::take>("take"),
       InstanceMethod<&HostPoolObject::available>("available"), InstanceMethod<&HostPoolObject::release>("release")});
}

Napi::Object HostPoolObject::create(Napi::Env env, std::shared_ptr<Device> device, double bytes) {
  Status status = Status::failure(StatusCode::out_of_memory, "no memory has so many bytes");
  std::shared_ptr<HostPool> pool;
  if (bytes >= 0 && bytes < 0x1p62) pool = HostPool::create(std::move(device), static_cast<size_t>(bytes), status);
  if (!pool) throw make_error(env, status);
  Napi::Object object = Environment::of(env)->host_pool_constructor.New({});
  Unwrap(object)->pool_ = std::move(pool);
  return object;
}

HostPoolObject::~HostPoolObject() {
  if (pool_) pool_->device().count_finalized();
}

HostPool& HostPoolObject::pool(Napi::Env env) const {
  if (!pool_) throw make_error(env, "KV_DISPOSED", "the pool was disposed; make another with hostPool()");
  return *pool_;
}

// makeSlab(): a promise of the number of bytes made. A call must wait for the previous one.
Napi::Value HostPoolObject::make_slab(const Napi::CallbackInfo& info) {
  pool(info.Env());
  auto* worker = new MakeSlab(info.Env(), pool_);
  Napi::Promise promise = worker->promise();
  worker->Queue();
  return promise;
}

// take(dtype, shape, strides, 0, bytes)
Napi::Value HostPoolObject::take(const Napi::CallbackInfo& info) {
  const Layout layout = layout_argument(info, 0);
  const double bytes = info[4].ToNumber().DoubleValue();
  std::shared_ptr<Storage> storage =
      bytes >= 0 && bytes < 0x1p62 ? pool(info.Env()).take(static_cast<size_t>(bytes)) : nullptr;
  if (!storage) throw make_error(info.Env(), "KV_OUT_OF_MEMORY", "the pool has no room");
  return TensorObject::create(info.Env(), std::move(storage), layout);
}

Napi::Value HostPoolObject::available(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), static_cast<double>(pool(info.Env()).available()));
}

Napi::Value HostPoolObject::release(const Napi::CallbackInfo& info) {
  pool_.reset();
  return info.Env().Undefined();
}

}  // namespace kv
