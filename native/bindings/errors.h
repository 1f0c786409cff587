// Turns native failures into JavaScript errors with one of the public codes. TypeScript turns these errors into the
// public classes.
#pragma once

#include <napi.h>

#include <string>

#include "runtime/status.h"

namespace kv {

inline const char* error_code(StatusCode code) {
  switch (code) {
    case StatusCode::out_of_memory:
      return "KV_OUT_OF_MEMORY";
    case StatusCode::capability:
      return "KV_CAPABILITY";
    case StatusCode::invalid_value:
      return "KV_INVALID_VALUE";
    default:
      return "KV_DEVICE";
  }
}

inline Napi::Error make_error(Napi::Env env, const char* code, const std::string& message) {
  Napi::Error error = Napi::Error::New(env, message);
  error.Set("code", Napi::String::New(env, code));
  return error;
}

inline Napi::Error make_error(Napi::Env env, const Status& status) {
  return make_error(env, error_code(status.code), status.message);
}

}  // namespace kv
