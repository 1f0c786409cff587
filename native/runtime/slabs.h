// Hands out pieces of a few equal slabs of memory. Pieces of a slab lie one behind the other; a slab is used anew
// once all of its pieces have come back. Cheap, bounded, and right for pieces that live for a short time.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace kv {

class Slabs {
 public:
  // `memory` holds `count` slabs, 64-byte aligned.
  Slabs(char* memory, size_t slab_bytes, size_t count);

  // 64-byte aligned; null when no slab has room.
  char* take(size_t bytes);
  void give_back(const char* piece);

 private:
  struct Slab {
    size_t used = 0;
    size_t pieces = 0;
  };

  char* memory_;
  size_t slab_bytes_;
  std::mutex mutex_;
  std::vector<Slab> slabs_;
  size_t current_ = 0;
};

}  // namespace kv
