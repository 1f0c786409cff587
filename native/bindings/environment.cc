#include "bindings/environment.h"

#include <algorithm>
#include <utility>

#include "runtime/background.h"

namespace kv {
namespace {

void run_job(napi_env env, napi_value, void*, void* data) {
  std::unique_ptr<Environment::Job> job(static_cast<Environment::Job*>(data));
  if (env == nullptr) return;
  Napi::HandleScope scope(env);
  try {
    (*job)(Napi::Env(env));
  } catch (const Napi::Error&) {
    // A JavaScript worker that is being terminated refuses every call. Nobody is left to get the result.
  }
}

}  // namespace

std::shared_ptr<Environment> Environment::create(Napi::Env env) {
  auto environment = std::make_shared<Environment>();
  napi_create_threadsafe_function(env, nullptr, nullptr, Napi::String::New(env, "kv"), 0, 1, nullptr, nullptr,
                                  nullptr, run_job, &environment->queue_);
  napi_unref_threadsafe_function(env, environment->queue_);
  env.SetInstanceData(new std::shared_ptr<Environment>(environment));
  env.AddCleanupHook([environment] { environment->close(); });
  return environment;
}

void Environment::closes_with(const std::shared_ptr<Stream>& stream) {
  const auto gone = [](const std::weak_ptr<Stream>& each) { return each.expired(); };
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), gone), streams_.end());
  streams_.push_back(stream);
}

void Environment::close() {
  for (const std::weak_ptr<Stream>& each : streams_) {
    if (const std::shared_ptr<Stream> stream = each.lock()) stream->close();
  }
  wait_for_background();
  std::lock_guard<std::mutex> lock(mutex_);
  queue_ = nullptr;
  for (Napi::FunctionReference* reference :
       {&tensor_constructor, &stream_constructor, &device_constructor, &recording_constructor,
        &host_pool_constructor}) {
    reference->Reset();
  }
}

std::shared_ptr<Environment> Environment::of(Napi::Env env) {
  return *env.GetInstanceData<std::shared_ptr<Environment>>();
}

void Environment::post(Job job) {
  auto owned = std::make_unique<Job>(std::move(job));
  std::lock_guard<std::mutex> lock(mutex_);
  if (queue_ == nullptr) return;
  if (napi_call_threadsafe_function(queue_, owned.get(), napi_tsfn_nonblocking) == napi_ok) owned.release();
}

void Environment::begin_pending(Napi::Env env) {
  if (pending_++ == 0) napi_ref_threadsafe_function(env, queue_);
}

void Environment::end_pending(Napi::Env env) {
  if (--pending_ == 0) napi_unref_threadsafe_function(env, queue_);
}

}  // namespace kv
