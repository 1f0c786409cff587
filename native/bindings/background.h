// What the JavaScript thread must not wait for.
#pragma once

#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace kv {

// Lets go of `held` on a thread of its own; on the caller's when the process can have no more.
template <class T>
void let_go_in_background(std::shared_ptr<T> held) {
  try {
    std::thread([held = std::move(held)]() mutable { held.reset(); }).detach();
  } catch (const std::system_error&) {
    // The thread that could not start has let go of it.
  }
}

}  // namespace kv
