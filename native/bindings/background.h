// Work that the JavaScript thread must not wait for.
#pragma once

#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace kv {

// Drops `held` on a thread of its own. If the process can have no more threads, the caller's thread drops it.
template <class T>
void let_go_in_background(std::shared_ptr<T> held) {
  try {
    std::thread([held = std::move(held)]() mutable { held.reset(); }).detach();
  } catch (const std::system_error&) {
    // std::thread has already dropped `held`.
  }
}

}  // namespace kv
