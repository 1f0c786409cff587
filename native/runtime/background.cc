#include "runtime/background.h"

#include <atomic>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

namespace kv {
namespace {

class BackgroundThreads {
 public:
  ~BackgroundThreads() { wait(); }

  // Throws std::system_error when the process can have no more threads.
  void start(const std::function<void()>& work) {
    std::lock_guard<std::mutex> lock(mutex_);
    threads_.remove_if([](Entry& entry) {
      if (!entry.ended.load()) return false;
      entry.thread.join();
      return true;
    });
    Entry& entry = threads_.emplace_back();
    try {
      entry.thread = std::thread([work, &entry]() mutable {
        work();
        entry.ended.store(true);
      });
    } catch (const std::system_error&) {
      threads_.pop_back();
      throw;
    }
  }

  // Work may start more of its kind.
  void wait() {
    while (true) {
      std::list<Entry> waited_for;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        waited_for.swap(threads_);
      }
      if (waited_for.empty()) return;
      for (Entry& entry : waited_for) entry.thread.join();
    }
  }

 private:
  struct Entry {
    std::thread thread;
    std::atomic<bool> ended{false};
  };

  std::mutex mutex_;
  std::list<Entry> threads_;
};

// It is made after the drivers that the work calls, and so goes before them.
BackgroundThreads& threads() {
  static BackgroundThreads all;
  return all;
}

}  // namespace

void run_in_background(std::function<void()> work) {
  try {
    threads().start(work);
  } catch (const std::system_error&) {
    work();
  }
}

void wait_for_background() { threads().wait(); }

}  // namespace kv
