// The native half of a recording.
#pragma once

#include <napi.h>

#include <memory>

#include "runtime/stream.h"

namespace kv {

class RecordingObject : public Napi::ObjectWrap<RecordingObject> {
 public:
  static Napi::Function define(Napi::Env env);
  static Napi::Object create(Napi::Env env, const std::shared_ptr<Stream>& stream, std::shared_ptr<Recording> recording);
  static RecordingObject& from(const Napi::Value& value) { return *Unwrap(value.As<Napi::Object>()); }

  explicit RecordingObject(const Napi::CallbackInfo& info) : Napi::ObjectWrap<RecordingObject>(info) {}
  ~RecordingObject() override { let_go(); }

  // Throws a JavaScript error when it was released.
  std::shared_ptr<Recording> recording(Napi::Env env) const;

 private:
  Napi::Value joined(const Napi::CallbackInfo& info);
  Napi::Value release(const Napi::CallbackInfo& info);
  // On the stream's thread, or in the background once the stream is closed: a device may still be at a replay, which the
  // JavaScript thread must not wait for.
  void let_go();

  std::weak_ptr<Stream> stream_;
  std::shared_ptr<Recording> recording_;
};

}  // namespace kv
