#include "runtime/host-bells.h"

#include <chrono>
#include <utility>

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than what lies between the host parts of a step.
constexpr auto kSpin = std::chrono::milliseconds(1);
constexpr auto kNap = std::chrono::microseconds(20);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

HostBells::HostBells(std::shared_ptr<HostBell> bells) : bells_(std::move(bells)) {
  thread_ = std::thread(&HostBells::thread_main, this);
}

HostBells::~HostBells() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_one();
  thread_.join();
}

std::shared_ptr<HostBell> HostBells::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t index = used_.load();
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (index < kCount) {
    used_.store(index + 1);
  } else {
    return nullptr;
  }
  return std::shared_ptr<HostBell>(bells_.get() + index, [all = shared_from_this(), index](HostBell*) {
    std::lock_guard<std::mutex> giving_back(all->mutex_);
    all->free_.push_back(index);
  });
}

void HostBells::expect(int64_t tasks) {
  const int64_t before = expected_.fetch_add(tasks);
  if (before != 0 || tasks <= 0) return;
  { std::lock_guard<std::mutex> lock(mutex_); }
  wake_.notify_one();
}

// Runs the tasks of the bells that ring. Returns whether one did.
bool HostBells::answer() {
  bool rang = false;
  const size_t used = used_.load();
  for (size_t i = 0; i < used; ++i) {
    HostBell& bell = bells_.get()[i];
    HostTask* const task = bell.task.load(std::memory_order_acquire);
    if (task == nullptr) continue;
    task->run();
    expected_.fetch_sub(1);
    bell.task.store(nullptr, std::memory_order_release);
    rang = true;
  }
  return rang;
}

void HostBells::thread_main() {
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return stop_.load() || expected_.load() > 0; });
      if (stop_.load()) return;
    }
    for (Clock::time_point rang = Clock::now(); expected_.load() > 0 && !stop_.load();) {
      if (answer()) rang = Clock::now();
      else if (Clock::now() - rang > kSpin) std::this_thread::sleep_for(kNap);
      else relax();
    }
  }
}

}  // namespace kv
