#include "bindings/stream-object.h"

#include <string>
#include <system_error>
#include <utility>

#include "bindings/environment.h"
#include "bindings/errors.h"
#include "bindings/recording-object.h"
#include "runtime/background.h"

namespace kv {
namespace {

struct Settlement {
  Settlement(Napi::Env env, Napi::Value result)
      : environment(Environment::of(env)),
        deferred(Napi::Promise::Deferred::New(env)),
        value(Napi::Reference<Napi::Value>::New(Napi::Array::New(env, 1), 1)) {
    value.Value().As<Napi::Array>().Set(uint32_t{0}, result);
    value.SuppressDestruct();
    environment->begin_pending(env);
  }

  void finish(Napi::Env env, const Status& status) {
    environment->end_pending(env);
    if (status.ok()) {
      deferred.Resolve(value.Value().As<Napi::Array>().Get(uint32_t{0}));
    } else {
      deferred.Reject(make_error(env, status).Value());
    }
    value.Reset();
  }

  std::shared_ptr<Environment> environment;
  Napi::Promise::Deferred deferred;
  Napi::Reference<Napi::Value> value;  // a reference cannot hold `undefined`, so an array holds the result
};

}  // namespace

void refuse_recording(const Stream& stream, Napi::Env env, const char* what) {
  if (!stream.recording()) return;
  throw make_error(env, "KV_CAPABILITY",
                   std::string(what) + " cannot be recorded: do it before the recording or between its replays");
}

Napi::Value settle_in_order(Stream& stream, Napi::Env env, Napi::Value value, std::function<void()> finish) {
  auto settlement = std::make_shared<Settlement>(env, value);
  Napi::Promise promise = settlement->deferred.Promise();
  stream.notify([settlement, finish = std::move(finish)](const Status& status) {
    if (status.ok() && finish) finish();
    settlement->environment->post([settlement, status](Napi::Env env) { settlement->finish(env, status); });
  });
  return promise;
}

Napi::Function StreamObject::define(Napi::Env env) {
  return DefineClass(env, "NativeStream",
                     {InstanceMethod<&StreamObject::begin_recording>("beginRecording"),
                      InstanceMethod<&StreamObject::end_recording>("endRecording"),
                      InstanceMethod<&StreamObject::replay>("replay"),
                      InstanceMethod<&StreamObject::synchronize>("synchronize"),
                      InstanceMethod<&StreamObject::wait_for>("waitFor"), InstanceMethod<&StreamObject::close>("close")});
}

Napi::Object StreamObject::create(Napi::Env env, std::shared_ptr<Device> device) {
  const std::shared_ptr<Environment> environment = Environment::of(env);
  Napi::Object object = environment->stream_constructor.New({});
  try {
    const auto stream = std::make_shared<Stream>(std::move(device));
    environment->closes_with(stream);
    Unwrap(object)->stream_ = stream;
  } catch (const std::bad_alloc&) {
    throw make_error(env, "KV_OUT_OF_MEMORY", "the device has no room for another stream");
  } catch (const std::system_error& error) {
    throw make_error(env, "KV_OUT_OF_MEMORY", std::string("there is no thread for another stream: ") + error.what());
  }
  return object;
}

Stream& StreamObject::stream(Napi::Env env) const {
  if (!stream_) throw make_error(env, "KV_DISPOSED", "the stream was disposed; create another on the device");
  return *stream_;
}

Napi::Value StreamObject::begin_recording(const Napi::CallbackInfo& info) {
  stream(info.Env()).begin_recording();
  return info.Env().Undefined();
}

Napi::Value StreamObject::end_recording(const Napi::CallbackInfo& info) {
  std::shared_ptr<Recording> recording = stream(info.Env()).end_recording();
  return RecordingObject::create(info.Env(), stream_, std::move(recording));
}

Napi::Value StreamObject::replay(const Napi::CallbackInfo& info) {
  refuse_recording(stream(info.Env()), info.Env(), "replay");
  stream(info.Env()).replay(RecordingObject::from(info[0]).recording(info.Env()));
  return info.Env().Undefined();
}

Napi::Value StreamObject::synchronize(const Napi::CallbackInfo& info) {
  refuse_recording(stream(info.Env()), info.Env(), "synchronize");
  return settle_in_order(stream(info.Env()), info.Env(), info.Env().Undefined());
}

Napi::Value StreamObject::wait_for(const Napi::CallbackInfo& info) {
  Stream& other = from(info[0]).stream(info.Env());
  if (!stream(info.Env()).can_wait_for(other)) {
    throw make_error(info.Env(), "KV_CAPABILITY",
                     "the other stream has no part in this recording: let it wait for a stream that has, or wait for it "
                     "before the recording or between its replays");
  }
  stream(info.Env()).wait_for(other, info[1].ToBoolean());
  return info.Env().Undefined();
}

Napi::Value StreamObject::close(const Napi::CallbackInfo& info) {
  close_in_background();
  return info.Env().Undefined();
}

// Closing waits for the operation that runs, and the JavaScript thread must not wait.
void StreamObject::close_in_background() {
  if (!stream_) return;
  stream_->leave_recording();
  // The stream is closed before it is destroyed: an environment that ends meanwhile must find it and wait for it.
  Stream* const closing = stream_.get();
  let_go_in_background(std::shared_ptr<Stream>(closing, [stream = std::move(stream_)](Stream*) { stream->close(); }));
}

}  // namespace kv
