// What the addon keeps for each JavaScript environment (the main thread and every worker thread has one).
#pragma once

#include <napi.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/stream.h"

namespace kv {

class Environment {
 public:
  using Job = std::function<void(Napi::Env)>;

  static std::shared_ptr<Environment> create(Napi::Env env);
  static std::shared_ptr<Environment> of(Napi::Env env);

  // Runs `job` on the JavaScript thread soon; from any thread. Dropped once the environment has closed.
  void post(Job job);

  // Operations may use memory of JavaScript, so what runs them is closed before that memory goes.
  void closes_with(const std::shared_ptr<Stream>& stream);

  // A pending promise keeps the process alive: begin and end on the JavaScript thread.
  void begin_pending(Napi::Env env);
  void end_pending(Napi::Env env);

  Napi::FunctionReference tensor_constructor;
  Napi::FunctionReference stream_constructor;
  Napi::FunctionReference device_constructor;
  Napi::FunctionReference recording_constructor;
  Napi::FunctionReference host_pool_constructor;

 private:
  // Native threads may hold this object longer than the environment lives.
  void close();

  std::mutex mutex_;
  napi_threadsafe_function queue_ = nullptr;
  size_t pending_ = 0;
  std::vector<std::weak_ptr<Stream>> streams_;
};

}  // namespace kv
