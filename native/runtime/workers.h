// A fixed pool of threads that share the indices of a loop. The caller works too, so `Workers(1)` starts no thread. A
// decode step is hundreds of short loops, so waiting threads spin briefly before they sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace kv {

class Workers {
 public:
  using Body = void (*)(void* context, size_t index, int worker);

  // Throws std::system_error when the process can have no more threads.
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(index, worker) once for each index in [0, count). A worker that is free takes the next index. Returns
  // when all calls are done. Only one loop may run at a time, and a body must not start another.
  template <class F>
  void for_each(size_t count, F&& body) {
    run(count, [](void* context, size_t index, int worker) { (*static_cast<F*>(context))(index, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Scratch memory, 64-byte aligned. It is valid until the next request of the same worker; `shared_scratch` until
  // its next call. A worker may ask only for its own, and nobody may call `shared_scratch` inside for_each. Throws
  // std::bad_alloc.
  void* scratch(int worker, size_t bytes) { return arena(static_cast<size_t>(worker) + 1, bytes); }
  void* shared_scratch(size_t bytes) { return arena(0, bytes); }

  // Bytes of scratch held at present.
  size_t scratch_bytes() const { return scratch_bytes_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Arena {
    void* data = nullptr;
    size_t bytes = 0;
  };

  void run(size_t count, Body body, void* context);
  void work(int worker);
  void thread_main(int worker);
  void stop();
  void* arena(size_t slot, size_t bytes);

  Body body_ = nullptr;
  void* context_ = nullptr;
  size_t count_ = 0;
  alignas(64) std::atomic<size_t> next_{0};
  // The loop in progress: its number, whether threads may still join, and how many threads are inside. A thread that
  // wakes late finds the gate closed, and nobody waits for it.
  alignas(64) std::atomic<uint64_t> gate_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr failure_;
  std::vector<Arena> arenas_;
  std::atomic<size_t> scratch_bytes_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kv
