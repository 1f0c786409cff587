// The native half of a stream: synchronising, moving bytes, closing.
#pragma once

#include <napi.h>

#include <functional>
#include <memory>

#include "bindings/native-object.h"
#include "runtime/stream.h"

namespace kv {

class StreamObject : public NativeObject<StreamObject> {
 public:
  static constexpr char kName[] = "native stream";
  static constexpr napi_type_tag kTag = {0x6b762d7374726561, 0x4a81e6b30c97d25f};

  static Napi::Function define(Napi::Env env);
  static Napi::Object create(Napi::Env env, std::shared_ptr<Device> device);

  explicit StreamObject(const Napi::CallbackInfo& info) : NativeObject<StreamObject>(info) {}
  ~StreamObject() override { close_in_background(); }

  // Throws a JavaScript error when the stream was closed.
  Stream& stream(Napi::Env env) const;

 private:
  Napi::Value begin_recording(const Napi::CallbackInfo& info);
  Napi::Value end_recording(const Napi::CallbackInfo& info);
  Napi::Value replay(const Napi::CallbackInfo& info);
  Napi::Value synchronize(const Napi::CallbackInfo& info);
  Napi::Value wait_for(const Napi::CallbackInfo& info);
  Napi::Value close(const Napi::CallbackInfo& info);
  void close_in_background();

  std::shared_ptr<Stream> stream_;
};

// Throws a JavaScript error when the stream is recording. What waits for the host, or uses JavaScript's memory,
// cannot be repeated.
void refuse_recording(const Stream& stream, Napi::Env env, const char* what);

// A promise of `value` that settles when all that is enqueued on `stream` so far is done. If it succeeded, `finish`
// runs before that on the stream's thread.
Napi::Value settle_in_order(Stream& stream, Napi::Env env, Napi::Value value, std::function<void()> finish = nullptr);

}  // namespace kv
