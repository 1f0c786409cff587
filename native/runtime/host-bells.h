// How a device calls the host without its driver, which takes some 20 us for a host function: it writes the address of a
// host task to a word of host memory, and waits until the word is null again. A thread looks at these words, runs what
// it finds, and clears them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/host-part.h"

namespace kv {

// One for whatever the device may do at a time. It must be null when it is made.
struct alignas(64) HostBell {
  std::atomic<HostTask*> task{nullptr};
};

class HostBells : public std::enable_shared_from_this<HostBells> {
 public:
  static constexpr size_t kCount = 1024;

  // `bells`: kCount of them, which the device reaches. Throws std::system_error when the process can have no more
  // threads.
  explicit HostBells(std::shared_ptr<HostBell> bells);
  // No task may be on its way.
  ~HostBells();
  HostBells(const HostBells&) = delete;
  HostBells& operator=(const HostBells&) = delete;

  // A bell that nobody else has. Null when all are taken.
  std::shared_ptr<HostBell> take();

  // Says, before they are launched, how many tasks will ring; or, with a negative number, that as many will not. The
  // thread sleeps while there are none, and looks less often when it has found none for a while.
  void expect(int64_t tasks);

 private:
  void thread_main();
  bool answer();

  std::shared_ptr<HostBell> bells_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};
  std::vector<size_t> free_;
  std::atomic<size_t> used_{0};  // bells that have ever been taken are before this one
  std::atomic<int64_t> expected_{0};
  std::thread thread_;
};

}  // namespace kv
