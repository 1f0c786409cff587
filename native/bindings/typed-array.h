#pragma once

#include <napi.h>

namespace kv {

// Where a typed array's elements are, over an ArrayBuffer or a SharedArrayBuffer.
inline char* bytes_of(const Napi::Value& array) {
  void* data = nullptr;
  napi_get_typedarray_info(array.Env(), array, nullptr, nullptr, &data, nullptr, nullptr);
  return static_cast<char*>(data);
}

}  // namespace kv
