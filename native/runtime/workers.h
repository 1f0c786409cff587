// A fixed pool of threads that share the indices of a loop. The caller works too, so `Workers(1)` starts no thread. A
// decode step is hundreds of short loops, so waiting threads spin briefly before they sleep.
#pragma once

#include <cstddef>

namespace kv {

// The most rows of memory that a kernel reads at once.
constexpr short kMostMemoryStreams = 4;
// How often a line of memory is asked for on a core that drops requests.
constexpr short kMostRequests = 6;

// How a thread reads rows of memory, where a kernel can do so in several ways. It changes speed, never a result.
// One word, which is read and written at once.
struct alignas(8) MemoryReading {
  short streams = 1;   // rows at once: 1, 2 or 4
  short cache = 1;     // that of a core in which memory is asked for ahead of its use: 1 or 2
  short requests = 1;  // how often a line is asked for: once, or kMostRequests times in the second cache
};

class Workers {
 public:
  using Body = void (*)(void* context, size_t index, int worker);

  // Throws std::system_error when the process can have no more threads.
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return count_; }

  // May be set at any time. shared/memory-streams finds the fastest.
  MemoryReading memory_reading() const;
  void set_memory_reading(MemoryReading reading);

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

  // Shared scratch for what all workers read: like `shared_scratch`, but calls take turns on a ring of memory. A line that all
  // cores have read lately takes several times as long to write. One worker has no ring, and gets `shared_scratch`.
  void* shared_ring(size_t bytes);

  // Bytes of scratch held at present.
  size_t scratch_bytes() const;

 private:
  // Every kernel includes this header, and what threads need of the standard library is slow to compile.
  struct Pool;

  void run(size_t count, Body body, void* context);
  void* arena(size_t slot, size_t bytes);

  const int count_;
  Pool* const pool_;
};

}  // namespace kv
