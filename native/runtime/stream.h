// An ordered queue of operations, run by a thread of its own that shares the device's workers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device.h"
#include "runtime/status.h"
#include "runtime/storage.h"

namespace kv {

class Stream {
 public:
  using Operation = std::function<Status(ExecutionContext&)>;
  using Holds = std::vector<std::shared_ptr<Storage>>;
  // Called on the stream's thread when everything before it is done, with the first failure so far.
  using Notification = std::function<void(const Status&)>;

  explicit Stream(std::shared_ptr<Device> device);
  // Drops what has not begun, telling its notifications so, and waits for the operation in progress.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const std::shared_ptr<Device>& device() const { return device_; }

  // `name` is the operation's public name, for messages. `holds` stay alive until it has run. Once an
  // operation failed, later ones are skipped and every notification reports that failure.
  void enqueue(const char* name, Holds holds, Operation operation);
  void notify(Notification notification);

  // What is enqueued here from now on runs after all that is enqueued on `other` so far.
  void wait_for(Stream& other);

 private:
  // An operation, a notification, or a point of another stream to wait for.
  struct Entry {
    const char* name = nullptr;
    Holds holds;
    Operation operation;
    Notification notification;
    std::future<Status> reached;
  };

  void push(Entry entry);
  void thread_main();
  Status run(Entry& entry);
  Status launch(Entry& entry);
  void synchronize();
  // `operation` is the one that returned the status, if one did.
  void fail(const Status& status, const char* operation);

  std::shared_ptr<Device> device_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  bool stop_ = false;
  Status failure_;
  std::shared_ptr<Queue> launched_;
  // Operations since the device last confirmed that all was well; the first to suspect of a fault.
  std::vector<const char*> unconfirmed_;
  std::thread thread_;
};

}  // namespace kv
