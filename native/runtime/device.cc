#include "runtime/device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace kv {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

size_t physical_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

Device::Device(int threads, Isa isa, size_t memory_limit)
    : workers_(threads), isa_(isa), limit_(memory_limit == 0 ? physical_memory() : memory_limit) {}

void* Device::allocate(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(accounts_);
    if (bytes > limit_ || live_ > limit_ - bytes) return nullptr;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
  }
  const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* data = nullptr;
  if (posix_memalign(&data, alignment, rounded) != 0) {
    std::lock_guard<std::mutex> lock(accounts_);
    live_ -= bytes;
    return nullptr;
  }
#if defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
#endif
  return data;
}

void Device::release(void* data, size_t bytes) {
  std::free(data);
  std::lock_guard<std::mutex> lock(accounts_);
  live_ -= bytes;
}

MemoryReport Device::memory() {
  std::lock_guard<std::mutex> lock(accounts_);
  return {live_, peak_, workers_.scratch_bytes(), limit_, finalized_.load(std::memory_order_relaxed)};
}

}  // namespace kv
