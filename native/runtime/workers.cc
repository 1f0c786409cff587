#include "runtime/workers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace kv {
namespace {

// Long enough for the gap between two operations of a decode step, and short enough that an idle pool soon frees its
// cores.
constexpr auto kSpin = std::chrono::microseconds(60);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A ring has room for some calls like the largest so far, up to so many bytes, or for one that is larger. Where so much memory
// cannot be had, it has room for one.
constexpr size_t kRingCalls = 8;
constexpr size_t kRingBytes = size_t{64} << 20;

size_t round_to_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

constexpr uint64_t kInside = 0xffffff;
constexpr uint64_t kOpen = uint64_t{1} << 24;
constexpr uint64_t kNumber = uint64_t{1} << 25;

template <class Ready>
bool spin_until(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

}  // namespace

struct Workers::Pool {
  explicit Pool(int threads);
  ~Pool();

  void run(size_t count, Body body, void* context);
  void* arena(size_t slot, size_t bytes);
  void* ring(size_t bytes);

  std::atomic<size_t> scratch_bytes{0};
  std::atomic<MemoryReading> memory_reading{MemoryReading{}};

 private:
  struct alignas(64) Arena {
    void* data = nullptr;
    size_t bytes = 0;
  };

  bool grow(Arena& arena, size_t bytes);
  void work(int worker);
  void thread_main(int worker);
  void stop();

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
  // Shared, each worker's, and the ring.
  std::vector<Arena> arenas_;
  size_t ring_next_ = 0;
  std::vector<std::thread> threads_;
};

Workers::Pool::Pool(int threads) : arenas_(static_cast<size_t>(threads) + 2) {
  try {
    for (int worker = 1; worker < threads; ++worker) threads_.emplace_back(&Pool::thread_main, this, worker);
  } catch (...) {
    stop();
    throw;
  }
}

Workers::Pool::~Pool() {
  stop();
  for (Arena& arena : arenas_) std::free(arena.data);
}

void Workers::Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::Pool::run(size_t count, Body body, void* context) {
  if (count == 0) return;
  body_ = body;
  context_ = context;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  if (count > 1 && !threads_.empty()) {
    gate_.store((gate_.load(std::memory_order_relaxed) & ~(kNumber - 1)) + kNumber + kOpen);
    if (sleeping_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    work(0);
    gate_.fetch_and(~kOpen);
    const auto all_left = [&] { return (gate_.load() & kInside) == 0; };
    while (!spin_until(all_left)) std::this_thread::yield();
  } else {
    work(0);
  }
  if (failure_) {
    std::exception_ptr failure = std::exchange(failure_, nullptr);
    std::rethrow_exception(failure);
  }
}

void Workers::Pool::work(int worker) {
  for (size_t index = next_.fetch_add(1, std::memory_order_relaxed); index < count_;
       index = next_.fetch_add(1, std::memory_order_relaxed)) {
    try {
      body_(context_, index, worker);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      failure_ = std::current_exception();
      next_.store(count_, std::memory_order_relaxed);
    }
  }
}

void Workers::Pool::thread_main(int worker) {
  uint64_t seen = 0;
  while (true) {
    const auto called = [&] { return stop_.load() || (gate_.load() & ~(kNumber - 1)) != seen; };
    if (!spin_until(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, called);
      sleeping_.fetch_sub(1);
    }
    if (stop_.load()) return;
    uint64_t gate = gate_.load();
    seen = gate & ~(kNumber - 1);
    while ((gate & kOpen) != 0 && !gate_.compare_exchange_weak(gate, gate + 1)) {
    }
    if ((gate & kOpen) == 0) continue;
    seen = gate & ~(kNumber - 1);
    work(worker);
    gate_.fetch_sub(1);
  }
}

// Leaves the arena as it is when there is no memory.
bool Workers::Pool::grow(Arena& arena, size_t bytes) {
  if (arena.bytes >= bytes) return true;
  const size_t rounded = round_to_pages(bytes);
  void* data = std::aligned_alloc(64, rounded);
  if (data == nullptr) return false;
  std::free(arena.data);
  scratch_bytes.fetch_add(rounded - arena.bytes, std::memory_order_relaxed);
  arena = {data, rounded};
  return true;
}

void* Workers::Pool::arena(size_t slot, size_t bytes) {
  if (!grow(arenas_[slot], bytes)) throw std::bad_alloc();
  return arenas_[slot].data;
}

void* Workers::Pool::ring(size_t bytes) {
  Arena& ring = arenas_.back();
  const size_t rounded = round_to_pages(bytes);
  const size_t wanted = std::max(rounded, std::min(kRingCalls * rounded, kRingBytes));
  if (!grow(ring, wanted) && !grow(ring, rounded)) throw std::bad_alloc();
  if (ring_next_ + rounded > ring.bytes) ring_next_ = 0;
  char* data = static_cast<char*>(ring.data) + ring_next_;
  ring_next_ += rounded;
  return data;
}

Workers::Workers(int threads) : count_(threads), pool_(new Pool(threads)) {}

Workers::~Workers() { delete pool_; }

size_t Workers::scratch_bytes() const { return pool_->scratch_bytes.load(std::memory_order_relaxed); }

MemoryReading Workers::memory_reading() const { return pool_->memory_reading.load(std::memory_order_relaxed); }

void Workers::set_memory_reading(MemoryReading reading) {
  pool_->memory_reading.store(reading, std::memory_order_relaxed);
}

void Workers::run(size_t count, Body body, void* context) { pool_->run(count, body, context); }

void* Workers::shared_ring(size_t bytes) { return count_ == 1 ? shared_scratch(bytes) : pool_->ring(bytes); }

void* Workers::arena(size_t slot, size_t bytes) { return pool_->arena(slot, bytes); }

}  // namespace kv
