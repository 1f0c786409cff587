// An ordered queue of operations. Each stream has one thread, which runs them on the device's workers.
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
  // Called on the stream's thread when all that was enqueued before it is done. It gets the first failure so far.
  using Notification = std::function<void(const Status&)>;

  // Throws std::bad_alloc when the device has no room for a stream.
  explicit Stream(std::shared_ptr<Device> device);
  ~Stream() { close(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Drops operations that have not begun, fails their notifications, and waits for the operation that runs. Any
  // threads may call it.
  void close();

  const std::shared_ptr<Device>& device() const { return device_; }

  // Once an operation has failed, later operations are skipped and every notification reports that failure.
  void enqueue(Operation operation);
  void notify(Notification notification);

  // What is enqueued here from now on runs after all that is enqueued on `other` so far. Only this stream's thread
  // waits on the host, and only until `other`'s thread has launched that work. A stream that waits for a recording
  // one becomes a branch of the recording until the recording ends. A recording stream can wait only for such
  // branches. A failure of `other` fails this stream too, unless this stream takes the place of one that failed.
  void wait_for(Stream& other, bool takes_failure = true);
  bool can_wait_for(const Stream& other) const { return !recording() || recording_ == other.recording_; }

  // Between these two calls `enqueue` collects operations instead of running them. One thread must make all these
  // calls.
  void begin_recording();
  std::shared_ptr<Recording> end_recording();
  bool recording() const { return recording_ != nullptr && recording_->open; }
  // Called for a stream that is to be closed. If it began the recording, the recording ends; if it is a branch, the
  // recording goes on.
  void leave_recording();

  void replay(std::shared_ptr<Recording> recording);
  // Drops a recording after its replays are launched.
  void release(std::shared_ptr<Recording> recording);

 private:
  enum class Kind { operation, replay, release, notification, signal, wait };

  // What one stream tells another that waits for it: a moment, if its work goes on after the launch, and the first
  // failure before the moment.
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
    bool takes_failure = true;
  };

  // A notification whose moment has not come yet.
  struct Awaited {
    std::shared_ptr<Moment> moment;
    Notification notification;
    Status failure;                               // what had failed at the mark
    std::vector<const char*> operations;          // launched since the previous mark
    std::vector<std::shared_ptr<Moment>> others;  // moments of streams that this one waited for since the previous mark
  };

  void push(Entry entry);
  // Returns false when the stream is closed and the queue is empty.
  bool next(Entry& entry);
  void thread_main();
  void process(Entry& entry);
  void run(const Operation& operation);
  void replay_now(Recording& recording);
  // Must be called before an operation is launched on this stream's queue or on one of its branches.
  Status prepare(const Operation& operation);
  Status launch(const Operation& operation, Queue& queue);
  // Stops at the first step that fails. `current` is then that step's name.
  Status launch_steps(const Recording& recording, const char*& current);
  void follow(std::future<Signal>& other, bool takes_failure);
  void await(Notification notification);
  // Delivers the notifications whose moments have come. With `all`, waits for the other moments too.
  void settle(bool all);
  void fail(const Status& status, const char* operation);

  std::shared_ptr<Device> device_;
  std::shared_ptr<Queue> launched_;
  // Only the thread that enqueues uses these two.
  std::shared_ptr<Recording> recording_;
  size_t branch_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  bool stop_ = false;
  Status failure_;
  // Operations since the last mark. The device names no operation in a fault that it finds later, so these are named.
  std::vector<const char*> unconfirmed_;
  // Moments of streams that this one waited for since the last mark. A failure of those streams fails this one too.
  std::vector<std::shared_ptr<Moment>> others_;
  std::deque<Awaited> awaited_;
  std::mutex closing_;
  std::thread thread_;
};

}  // namespace kv
