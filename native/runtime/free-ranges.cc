#include "runtime/free-ranges.h"

#include <iterator>

namespace kv {

FreeRanges::FreeRanges(size_t size) : available_(size) {
  if (size > 0) sizes_[0] = size;
}

std::optional<size_t> FreeRanges::take(size_t size) {
  for (auto range = sizes_.begin(); range != sizes_.end(); ++range) {
    const auto [offset, free] = *range;
    if (free < size) continue;
    sizes_.erase(range);
    if (free > size) sizes_[offset + size] = free - size;
    available_ -= size;
    return offset;
  }
  return std::nullopt;
}

void FreeRanges::give_back(size_t offset, size_t size) {
  available_ += size;
  auto next = sizes_.lower_bound(offset);
  if (next != sizes_.end() && next->first == offset + size) {
    size += next->second;
    next = sizes_.erase(next);
  }
  if (next != sizes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  sizes_[offset] = size;
}

}  // namespace kv
