// A place where tensors live and operations run, with its memory accounts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "runtime/execution.h"

namespace kv {

struct MemoryReport {
  size_t live = 0;       // bytes of tensors allocated now
  size_t peak = 0;       // the most that `live` has been
  size_t scratch = 0;    // working memory of kernels
  size_t limit = 0;      // allocations past this are refused
  uint64_t finalized = 0;  // tensors that the garbage collector had to release: leaks
};

class Device {
 public:
  // `memory_limit` 0 means all the physical memory.
  Device(int threads, Isa isa, size_t memory_limit);

  // Memory for a tensor, 64-byte aligned; null when it does not fit.
  void* allocate(size_t bytes);
  void release(void* data, size_t bytes);
  void count_finalized() { finalized_.fetch_add(1, std::memory_order_relaxed); }
  MemoryReport memory();

  Workers& workers() { return workers_; }
  Isa isa() const { return isa_; }

  // Held while an operation runs: the streams of a CPU device take turns on its workers.
  std::mutex& turn() { return turn_; }

 private:
  Workers workers_;
  Isa isa_;
  std::mutex turn_;
  std::mutex accounts_;
  size_t live_ = 0;
  size_t peak_ = 0;
  size_t limit_ = 0;
  std::atomic<uint64_t> finalized_{0};
};

size_t physical_memory();

}  // namespace kv
