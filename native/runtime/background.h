// Work that the JavaScript thread must not wait for.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace kv {

// Runs `work` on a thread of its own; if the process can have no more threads, on the caller's. The process ends only
// when all such work has: it may call drivers, which are gone then.
void run_in_background(std::function<void()> work);

// Waits for all such work that has begun.
void wait_for_background();

template <class T>
void let_go_in_background(std::shared_ptr<T> held) {
  run_in_background([held = std::move(held)]() mutable { held.reset(); });
}

}  // namespace kv
