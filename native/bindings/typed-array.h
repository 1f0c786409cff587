// Finds the bytes of a typed array over an ArrayBuffer or a SharedArrayBuffer. The array's own properties may be
// overwritten, so its memory is asked.
#pragma once

#include <napi.h>

#include <string>

#include "bindings/errors.h"

namespace kv {

struct ArrayBytes {
  char* data = nullptr;
  size_t bytes = 0;
};

// Throws a JavaScript error unless `value` is a typed array. An array whose buffer was detached has no bytes.
inline ArrayBytes array_bytes(const Napi::Value& value) {
  if (!value.IsTypedArray()) throw make_error(value.Env(), "KV_INVALID_VALUE", "a typed array was wanted");
  void* data = nullptr;
  napi_get_typedarray_info(value.Env(), value, nullptr, nullptr, &data, nullptr, nullptr);
  return {static_cast<char*>(data), value.As<Napi::TypedArray>().ByteLength()};
}

// Throws a JavaScript error unless the array has exactly `wanted` bytes.
inline char* bytes_of(const Napi::Value& value, size_t wanted) {
  const ArrayBytes array = array_bytes(value);
  if (array.bytes == wanted) return array.data;
  throw make_error(value.Env(), "KV_SHAPE",
                   "an array has " + std::to_string(array.bytes) + " bytes and not " + std::to_string(wanted));
}

}  // namespace kv
