// An ordered queue of operations, run by a thread of its own that shares the device's workers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/device.h"
#include "runtime/operation.h"
#include "runtime/recording.h"
#include "runtime/status.h"

namespace kv {

class Stream {
 public:
  // Called on the stream's thread when everything before it is done, with the first failure so far.
  using Notification = std::function<void(const Status&)>;

  // Throws std::bad_alloc when the device has no room for a stream.
  explicit Stream(std::shared_ptr<Device> device);
  ~Stream() { close(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Drops what has not begun, telling its notifications so, and waits for the operation in progress. From any threads.
  void close();

  const std::shared_ptr<Device>& device() const { return device_; }

  // Once an operation failed, later ones are skipped and every notification reports that failure.
  void enqueue(Operation operation);
  void notify(Notification notification);

  // What is enqueued here from now on runs after all that is enqueued on `other` so far. Nobody waits on the host but
  // this stream's thread, until `other`'s has launched that. A stream that waits for one that records becomes a branch
  // of the recording until that ends; of a stream that records, only such branches can be waited for.
  void wait_for(Stream& other);
  bool can_wait_for(const Stream& other) const { return !recording() || recording_ == other.recording_; }

  // Between the two calls `enqueue` collects operations instead of running them. All on the thread that enqueues.
  void begin_recording();
  std::shared_ptr<Recording> end_recording();
  bool recording() const { return recording_ != nullptr && recording_->open; }
  // A stream that is to be closed records no more. Its own recording ends, one that it is a branch of goes on.
  void leave_recording();

  void replay(std::shared_ptr<Recording> recording);
  // Lets go of a recording once its replays are launched.
  void release(std::shared_ptr<Recording> recording);

 private:
  enum class Kind { operation, replay, release, notification, signal, wait };

  // Where another stream waits: the moment, if work goes on after its launch, and the first failure before it.
  struct Signal {
    std::shared_ptr<Moment> moment;
    Status failure;
  };

  struct Entry {
    Kind kind = Kind::release;
    Operation operation;
    std::shared_ptr<Recording> recording;
    Notification notification;
    std::shared_ptr<std::promise<Signal>> signal;
    std::future<Signal> awaited;
  };

  // A notification whose moment has not come yet.
  struct Awaited {
    std::shared_ptr<Moment> moment;
    Notification notification;
    Status failure;                               // known when it was marked
    std::vector<const char*> operations;          // launched since the moment before
    std::vector<std::shared_ptr<Moment>> others;  // of streams that were waited for since then
  };

  void push(Entry entry);
  // False when the stream is closed and nothing is left.
  bool next(Entry& entry);
  void thread_main();
  void process(Entry& entry);
  void run(const Operation& operation);
  void replay_now(Recording& recording);
  // To be used on this stream's queue, or on a branch that it waits for.
  Status prepare(const Operation& operation);
  Status launch(const Operation& operation, Queue& queue);
  // Stops at the first that fails, whose name `current` has then.
  Status launch_steps(const Recording& recording, const char*& current);
  void follow(std::future<Signal>& other);
  void await(Notification notification);
  // Delivers the notifications whose moments have come; with `all`, waits for the others.
  void settle(bool all);
  void fail(const Status& status, const char* operation);

  std::shared_ptr<Device> device_;
  std::shared_ptr<Queue> launched_;
  // Of the thread that enqueues.
  std::shared_ptr<Recording> recording_;
  size_t branch_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  bool stop_ = false;
  Status failure_;
  // Operations since the last mark; the first to suspect of a fault that the device finds later.
  std::vector<const char*> unconfirmed_;
  // Of streams that were waited for since the last mark: what failed there fails this stream too.
  std::vector<std::shared_ptr<Moment>> others_;
  std::deque<Awaited> awaited_;
  std::mutex closing_;
  std::thread thread_;
};

}  // namespace kv
