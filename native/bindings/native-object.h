// What all objects with a native half have in common: each kind has a tag, so that one given as another, or an object
// that only looks like one, is refused where it is unwrapped.
#pragma once

#include <napi.h>

#include <string>

#include "bindings/errors.h"

namespace kv {

// `Object` says its `kName` and `kTag`, which is like no other's.
template <class Object>
class NativeObject : public Napi::ObjectWrap<Object> {
 public:
  // Throws a JavaScript error unless `value` is an object of this kind.
  static Object& from(const Napi::Value& value) {
    bool tagged = false;
    if (value.IsObject()) napi_check_object_type_tag(value.Env(), value, &Object::kTag, &tagged);
    if (!tagged) throw make_error(value.Env(), "KV_INVALID_VALUE", std::string("a ") + Object::kName + " was wanted");
    return *Napi::ObjectWrap<Object>::Unwrap(value.As<Napi::Object>());
  }

 protected:
  explicit NativeObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<Object>(info) {
    info.This().As<Napi::Object>().TypeTag(&Object::kTag);
  }
};

}  // namespace kv
