#include "bindings/tensor-object.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "bindings/environment.h"
#include "bindings/errors.h"

namespace kv {
namespace {

constexpr int64_t kMostElements = (int64_t{1} << 53) - 1;  // the largest integer that a JavaScript number holds exactly

int64_t whole_number(const Napi::Value& value, int64_t most) {
  const double number = value.IsNumber() ? value.As<Napi::Number>().DoubleValue() : -1;
  if (!(number >= 0 && number <= static_cast<double>(most)) || number != std::floor(number)) {
    throw make_error(value.Env(), "KV_SHAPE", "a whole number from 0 to " + std::to_string(most) + " was wanted");
  }
  return static_cast<int64_t>(number);
}

// Throws a JavaScript error unless every element is aligned and lies in the storage.
void expect_within(Napi::Env env, const Layout& layout, const Storage& storage) {
  const auto size = static_cast<int64_t>(byte_size(layout.dtype));
  const auto bytes = static_cast<int64_t>(storage.bytes());
  int64_t end = layout.byte_offset;
  bool fits = end <= bytes;
  const bool empty = std::find(layout.shape, layout.shape + layout.rank, 0) != layout.shape + layout.rank;
  for (int axis = 0; axis < layout.rank && fits && !empty; ++axis) {
    int64_t reach = 0;
    fits = !__builtin_mul_overflow(layout.shape[axis] - 1, layout.strides[axis] * size, &reach) &&
           !__builtin_add_overflow(end, reach, &end) && end <= bytes;
  }
  if (!fits || (!empty && end + size > bytes)) throw make_error(env, "KV_SHAPE", "the elements reach past the memory");
  if ((reinterpret_cast<uintptr_t>(storage.data()) + static_cast<uintptr_t>(layout.byte_offset)) % byte_size(layout.dtype)) {
    throw make_error(env, "KV_SHAPE", "the elements do not lie at multiples of their size");
  }
}

}  // namespace

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
  const auto list = [&](size_t index) {
    if (!info[index].IsArray()) throw make_error(info.Env(), "KV_SHAPE", "an array of extents was wanted");
    return info[index].As<Napi::Array>();
  };
  const Napi::Array shape = list(first + 1);
  const Napi::Array strides = list(first + 2);
  if (shape.Length() > kMaxRank || strides.Length() != shape.Length()) {
    throw make_error(info.Env(), "KV_SHAPE", "a tensor has at most " + std::to_string(kMaxRank) + " axes");
  }
  Layout layout;
  layout.dtype = static_cast<DType>(whole_number(info[first], static_cast<int64_t>(DType::u8)));
  layout.rank = static_cast<int>(shape.Length());
  for (int axis = 0; axis < layout.rank; ++axis) {
    layout.shape[axis] = whole_number(shape.Get(static_cast<uint32_t>(axis)), kMostElements);
    layout.strides[axis] = whole_number(strides.Get(static_cast<uint32_t>(axis)), kMostElements);
  }
  layout.byte_offset = whole_number(info[first + 3], kMostElements);
  return layout;
}

Napi::Function TensorObject::define(Napi::Env env) {
  return DefineClass(env, "NativeTensor",
                     {InstanceMethod<&TensorObject::view>("view"), InstanceMethod<&TensorObject::address>("address"),
                      InstanceMethod<&TensorObject::release>("release")});
}

Napi::Object TensorObject::create(Napi::Env env, std::shared_ptr<Storage> storage, const Layout& layout) {
  expect_within(env, layout, *storage);
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
  if (!storage->in_place()) {
    throw make_error(env, "KV_DISPOSED", "the buffer that was wrapped has been detached; keep it until its last use is done");
  }
  return storage;
}

Napi::Value TensorObject::view(const Napi::CallbackInfo& info) {
  const Layout layout = layout_argument(info, 0);
  expect_within(info.Env(), layout, *storage(info.Env()));
  Napi::Object object = Environment::of(info.Env())->tensor_constructor.New({});
  TensorObject& tensor = *Unwrap(object);
  tensor.storage_ = storage_;
  tensor.layout_ = layout;
  return object;
}

Napi::Value TensorObject::address(const Napi::CallbackInfo& info) {
  const auto first = reinterpret_cast<uintptr_t>(storage(info.Env())->data()) + static_cast<uintptr_t>(layout_.byte_offset);
  return Napi::Number::New(info.Env(), static_cast<double>(first));
}

Napi::Value TensorObject::release(const Napi::CallbackInfo& info) {
  owned_.reset();
  return info.Env().Undefined();
}

}  // namespace kv
