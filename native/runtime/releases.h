// Frees memory once a device is done with it, on a thread that sleeps until then. Whoever gives up the memory does
// not wait.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/device.h"

namespace kv {

class Releases {
 public:
  // The thread calls `begin` first.
  explicit Releases(std::function<void()> begin) : begin_(std::move(begin)) {}
  // Waits for all releases.
  ~Releases();
  Releases(const Releases&) = delete;
  Releases& operator=(const Releases&) = delete;

  // Calls `release` after all `moments` have come and after every release that was added earlier. `release` must hold
  // nothing that owns this object.
  void add(std::vector<std::shared_ptr<Moment>> moments, std::function<void()> release);

 private:
  struct Release {
    std::vector<std::shared_ptr<Moment>> moments;
    std::function<void()> release;
    void run();
  };

  void thread_main();

  std::function<void()> begin_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Release> waiting_;
  bool stop_ = false;
  std::thread thread_;  // started by the first release
};

}  // namespace kv
