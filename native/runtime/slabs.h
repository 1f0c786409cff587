// Allocates short-lived parts of a few equal slabs of memory. The parts of a slab lie one after another. A slab is
// used again from its start once all of its parts have been given back, which is cheap and bounded.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace kv {

class Slabs {
 public:
  // `memory` holds `count` slabs, 64-byte aligned.
  Slabs(char* memory, size_t slab_bytes, size_t count);

  // 64-byte aligned. Null when no slab has room.
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
