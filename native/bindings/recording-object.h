// The native half of a recording.
#pragma once

#include <napi.h>

#include <memory>

#include "bindings/native-object.h"
#include "runtime/stream.h"

namespace kv {

class RecordingObject : public NativeObject<RecordingObject> {
 public:
  static constexpr char kName[] = "native recording";
  static constexpr napi_type_tag kTag = {0x6b762d7265636f72, 0x27c04e9d5f18ba63};

  static Napi::Function define(Napi::Env env);
  static Napi::Object create(Napi::Env env, const std::shared_ptr<Stream>& stream, std::shared_ptr<Recording> recording);

  explicit RecordingObject(const Napi::CallbackInfo& info) : NativeObject<RecordingObject>(info) {}
  ~RecordingObject() override { let_go(); }

  // Throws a JavaScript error when the recording was released.
  std::shared_ptr<Recording> recording(Napi::Env env) const;

 private:
  Napi::Value joined(const Napi::CallbackInfo& info);
  Napi::Value release(const Napi::CallbackInfo& info);
  // Drops the recording on the stream's thread, or in the background once the stream is closed. A replay may still
  // run on the device, and the JavaScript thread must not wait for it.
  void let_go();

  std::weak_ptr<Stream> stream_;
  std::shared_ptr<Recording> recording_;
};

}  // namespace kv
