// What the addon keeps for each JavaScript environment: the main thread has one, and so has every worker thread.
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

  // Runs `job` on the JavaScript thread soon. Any thread may call it. If the environment has closed, the job is
  // dropped.
  void post(Job job);

  // Registers a stream to be closed with the environment. Operations may use JavaScript's memory, so they must end
  // before that memory goes.
  void closes_with(const std::shared_ptr<Stream>& stream);

  // A pending promise keeps the process alive. Both calls must be made on the JavaScript thread.
  void begin_pending(Napi::Env env);
  void end_pending(Napi::Env env);

  Napi::FunctionReference tensor_constructor;
  Napi::FunctionReference stream_constructor;
  Napi::FunctionReference device_constructor;
  Napi::FunctionReference recording_constructor;
  Napi::FunctionReference host_pool_constructor;

 private:
  // Called when the environment ends. Native threads may hold this object for longer than that.
  void close();

  std::mutex mutex_;
  napi_threadsafe_function queue_ = nullptr;
  size_t pending_ = 0;
  std::vector<std::weak_ptr<Stream>> streams_;
};

}  // namespace kv
