// One call of an operation from JavaScript. It reads positional arguments, of which the stream is the first, and
// keeps the storage of every tensor until the operation has run.
#pragma once

#include <napi.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/stream-object.h"
#include "bindings/tensor-object.h"

namespace kv {

// `Memory` is const if the operation only reads the tensor.
template <class Memory>
struct BasicTensorArgument {
  Memory* data = nullptr;
  Layout layout;
  bool on_host = false;
  bool reached = false;  // the stream's device reads and writes the memory by address
  bool foreign = false;  // of another device, which may free the memory before the stream's device is done
  const Storage* storage = nullptr;  // of the memory; held until the operation has run

  explicit operator bool() const { return data != nullptr; }
  int64_t extent(int axis) const { return layout.shape[axis]; }
  int64_t stride(int axis) const { return layout.strides[axis]; }
  DType dtype() const { return layout.dtype; }
  size_t bytes() const { return static_cast<size_t>(layout.elements()) * byte_size(layout.dtype); }
  template <class T>
  auto as() const {
    return static_cast<std::conditional_t<std::is_const_v<Memory>, const T, T>*>(data);
  }
};

using TensorArgument = BasicTensorArgument<const void>;
using OutputArgument = BasicTensorArgument<void>;

class OperationCall {
 public:
  explicit OperationCall(const Napi::CallbackInfo& info) : info_(info) {}

  // A tensor that the operation only reads.
  TensorArgument tensor(size_t index) { return tensor(info_[index]); }
  TensorArgument tensor(const Napi::Value& value) {
    const OutputArgument argument = argument_of(value);
    return {argument.data, argument.layout, argument.on_host, argument.reached, argument.foreign, argument.storage};
  }
  // A field of an argument that is an object. Throws a JavaScript error when the field is missing.
  Napi::Value field(size_t index, const char* name) const {
    const Napi::Value value = info_[index].IsObject() ? info_[index].As<Napi::Object>().Get(name) : Napi::Value();
    if (!value.IsEmpty() && !value.IsUndefined()) return value;
    throw make_error(info_.Env(), "KV_INVALID_VALUE", std::string("the operation's arguments lack ") + name);
  }
  // A tensor that the operation writes, and may read. Throws a JavaScript error when its memory is read-only.
  OutputArgument output(size_t index) {
    const OutputArgument argument = copied(index);
    holds_.back()->mark_written();
    return argument;
  }
  // The same where a copy writes. On the device nothing that is launched behind it begins before it is done.
  OutputArgument copied(size_t index) {
    const OutputArgument argument = argument_of(info_[index]);
    if (holds_.back()->writable()) {
      if (argument.on_host) holds_.back()->mark_written();
      return argument;
    }
    throw make_error(info_.Env(), "KV_INVALID_VALUE",
                     "an output is over a file that was mapped, which is read-only; give a tensor to write to");
  }
  TensorArgument optional_tensor(size_t index) { return given(index) ? tensor(index) : TensorArgument{}; }
  OutputArgument optional_output(size_t index) { return given(index) ? output(index) : OutputArgument{}; }
  double number(size_t index) const { return info_[index].As<Napi::Number>().DoubleValue(); }
  int64_t integer(size_t index) const { return info_[index].As<Napi::Number>().Int64Value(); }
  bool flag(size_t index) const { return info_[index].ToBoolean(); }
  Stream& stream() const { return StreamObject::from(info_[0]).stream(info_.Env()); }

  // `name` must outlive the stream, so it must be a literal.
  Napi::Value enqueue(const char* name, std::function<Status(ExecutionContext&)> launch) {
    stream().enqueue({name, std::move(holds_), std::move(launch)});
    return info_.Env().Undefined();
  }

 private:
  bool given(size_t index) const { return !info_[index].IsUndefined(); }
  OutputArgument argument_of(const Napi::Value& value) {
    const TensorObject& object = TensorObject::from(value);
    std::shared_ptr<Storage> storage = object.storage(info_.Env());
    holds_.push_back(storage);
    const bool foreign = &storage->device() != stream().device().get();
    return {static_cast<char*>(storage->data()) + object.layout().byte_offset, object.layout(), storage->on_host(),
            !foreign && storage->on_device(), foreign, storage.get()};
  }

  const Napi::CallbackInfo& info_;
  std::vector<std::shared_ptr<Storage>> holds_;
};

}  // namespace kv
