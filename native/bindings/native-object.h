// The base of all objects with a native half. Each class has a tag. An object of another class, or one that only
// looks right, is refused where it is unwrapped.
#pragma once

#include <napi.h>

#include <string>

#include "bindings/errors.h"

namespace kv {

// `Object` declares `kName` and a `kTag` that no other class has.
template <class Object>
class NativeObject : public Napi::ObjectWrap<Object> {
 public:
  // Throws a JavaScript error unless `value` is an object of this class.
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
