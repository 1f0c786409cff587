// One call of an operation from JavaScript: reads positional arguments (the stream is the first) and
// keeps the storage of every tensor alive until the operation has run.
#pragma once

#include <napi.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/stream-object.h"
#include "bindings/tensor-object.h"

namespace kv {

struct TensorArgument {
  void* data = nullptr;
  Layout layout;
  bool on_host = false;

  explicit operator bool() const { return data != nullptr; }
  int64_t extent(int axis) const { return layout.shape[axis]; }
  int64_t stride(int axis) const { return layout.strides[axis]; }
  DType dtype() const { return layout.dtype; }
  size_t bytes() const { return static_cast<size_t>(layout.elements()) * byte_size(layout.dtype); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

class OperationCall {
 public:
  explicit OperationCall(const Napi::CallbackInfo& info) : info_(info) {}

  TensorArgument tensor(size_t index) {
    const TensorObject& object = TensorObject::from(info_[index]);
    std::shared_ptr<Storage> storage = object.storage(info_.Env());
    TensorArgument argument{static_cast<char*>(storage->data()) + object.layout().byte_offset, object.layout(),
                            storage->on_host()};
    holds_.push_back(std::move(storage));
    return argument;
  }
  TensorArgument optional_tensor(size_t index) {
    return info_[index].IsObject() ? tensor(index) : TensorArgument{};
  }
  double number(size_t index) const { return info_[index].As<Napi::Number>().DoubleValue(); }
  int64_t integer(size_t index) const { return info_[index].As<Napi::Number>().Int64Value(); }
  bool flag(size_t index) const { return info_[index].ToBoolean(); }
  Stream& stream() const { return StreamObject::from(info_[0]).stream(info_.Env()); }

  // `name` must outlive the stream: a literal.
  Napi::Value enqueue(const char* name, std::function<Status(ExecutionContext&)> launch) {
    stream().enqueue({name, std::move(holds_), std::move(launch)});
    return info_.Env().Undefined();
  }

 private:
  const Napi::CallbackInfo& info_;
  std::vector<std::shared_ptr<Storage>> holds_;
};

}  // namespace kv
