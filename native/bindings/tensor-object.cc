#include "bindings/tensor-object.h"

#include <utility>

#include "bindings/environment.h"
#include "bindings/errors.h"

namespace kv {

int64_t Layout::elements(int first) const {
  int64_t count = 1;
  for (int axis = first; axis < rank; ++axis) count *= shape[axis];
  return count;
}

bool Layout::contiguous(int first) const {
  int64_t expected = 1;
  for (int axis = rank - 1; axis >= first; --axis) {
    if (shape[axis] != 1 && strides[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

Layout layout_argument(const Napi::CallbackInfo& info, size_t first) {
  Layout layout;
  layout.dtype = static_cast<DType>(info[first].As<Napi::Number>().Int32Value());
  const auto shape = info[first + 1].As<Napi::Array>();
  const auto strides = info[first + 2].As<Napi::Array>();
  layout.rank = static_cast<int>(shape.Length());
  for (int axis = 0; axis < layout.rank && axis < kMaxRank; ++axis) {
    layout.shape[axis] = shape.Get(static_cast<uint32_t>(axis)).As<Napi::Number>().Int64Value();
    layout.strides[axis] = strides.Get(static_cast<uint32_t>(axis)).As<Napi::Number>().Int64Value();
  }
  layout.byte_offset = info[first + 3].As<Napi::Number>().Int64Value();
  return layout;
}

Napi::Function TensorObject::define(Napi::Env env) {
  return DefineClass(env, "NativeTensor",
                     {InstanceMethod<&TensorObject::view>("view"), InstanceMethod<&TensorObject::release>("release")});
}

Napi::Object TensorObject::create(Napi::Env env, std::shared_ptr<Storage> storage, const Layout& layout) {
  Napi::Object object = Environment::of(env)->tensor_constructor.New({});
  TensorObject& tensor = *Unwrap(object);
  tensor.storage_ = storage;
  tensor.owned_ = std::move(storage);
  tensor.layout_ = layout;
  return object;
}

TensorObject::~TensorObject() {
  if (owned_) owned_->device().count_finalized();
}

std::shared_ptr<Storage> TensorObject::storage(Napi::Env env) const {
  std::shared_ptr<Storage> storage = storage_.lock();
  if (!storage) throw make_error(env, "KV_DISPOSED", "the tensor was disposed; keep it until its last use is enqueued");
  return storage;
}

Napi::Value TensorObject::view(const Napi::CallbackInfo& info) {
  Napi::Object object = Environment::of(info.Env())->tensor_constructor.New({});
  TensorObject& tensor = *Unwrap(object);
  tensor.storage_ = storage_;
  tensor.layout_ = layout_argument(info, 0);
  return object;
}

Napi::Value TensorObject::release(const Napi::CallbackInfo& info) {
  owned_.reset();
  return info.Env().Undefined();
}

}  // namespace kv
