#include "runtime/releases.h"

#include <system_error>
#include <utility>

namespace kv {

Releases::~Releases() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Releases::Release::run() {
  for (const std::shared_ptr<Moment>& moment : moments) moment->wait();
  release();
}

void Releases::add(std::vector<std::shared_ptr<Moment>> moments, std::function<void()> release) {
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.push_back({std::move(moments), std::move(release)});
  try {
    if (!thread_.joinable()) thread_ = std::thread(&Releases::thread_main, this);
  } catch (const std::system_error&) {
    // The process can have no more threads, so the caller waits and releases the memory itself.
    Release own = std::move(waiting_.back());
    waiting_.pop_back();
    lock.unlock();
    own.run();
    return;
  }
  lock.unlock();
  wake_.notify_one();
}

void Releases::thread_main() {
  begin_();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Release next = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    next.run();
    next = {};
    lock.lock();
  }
}

}  // namespace kv
