#include "runtime/slabs.h"

#include <algorithm>

namespace kv {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

Slabs::Slabs(char* memory, size_t slab_bytes, size_t count)
    : memory_(memory), slab_bytes_(slab_bytes), slabs_(count) {}

char* Slabs::take(size_t bytes) {
  if (bytes > slab_bytes_) return nullptr;
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t tried = 0; tried < slabs_.size(); ++tried) {
    Slab& slab = slabs_[current_];
    if (slab.pieces == 0) slab.used = 0;
    if (rounded <= slab_bytes_ - slab.used) {
      char* piece = memory_ + current_ * slab_bytes_ + slab.used;
      slab.used += rounded;
      ++slab.pieces;
      return piece;
    }
    current_ = (current_ + 1) % slabs_.size();
  }
  return nullptr;
}

void Slabs::give_back(const char* piece) {
  std::lock_guard<std::mutex> lock(mutex_);
  --slabs_[static_cast<size_t>(piece - memory_) / slab_bytes_].pieces;
}

}  // namespace kv
