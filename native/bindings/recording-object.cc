#include "bindings/recording-object.h"

#include <utility>

#include "bindings/environment.h"
#include "bindings/errors.h"
#include "runtime/background.h"

namespace kv {

Napi::Function RecordingObject::define(Napi::Env env) {
  return DefineClass(env, "NativeRecording", {InstanceMethod<&RecordingObject::joined>("joined"),
                                             InstanceMethod<&RecordingObject::release>("release")});
}

Napi::Object RecordingObject::create(Napi::Env env, const std::shared_ptr<Stream>& stream,
                                     std::shared_ptr<Recording> recording) {
  Napi::Object object = Environment::of(env)->recording_constructor.New({});
  RecordingObject& made = *Unwrap(object);
  made.stream_ = stream;
  made.recording_ = std::move(recording);
  return object;
}

std::shared_ptr<Recording> RecordingObject::recording(Napi::Env env) const {
  if (!recording_) throw make_error(env, "KV_DISPOSED", "the recording was disposed; record the operations again");
  return recording_;
}

Napi::Value RecordingObject::joined(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), recording(info.Env())->joined());
}

Napi::Value RecordingObject::release(const Napi::CallbackInfo& info) {
  let_go();
  return info.Env().Undefined();
}

void RecordingObject::let_go() {
  if (!recording_) return;
  const std::shared_ptr<Stream> stream = stream_.lock();
  if (stream) return stream->release(std::move(recording_));
  let_go_in_background(std::move(recording_));
}

}  // namespace kv
