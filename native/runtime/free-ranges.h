// Which parts of a range are free. `take` returns the first part that fits. Parts that are given back join their free
// neighbours.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace kv {

class FreeRanges {
 public:
  explicit FreeRanges(size_t size);

  // The offset of the part. Empty when no free part is large enough.
  std::optional<size_t> take(size_t size);
  void give_back(size_t offset, size_t size);

  size_t available() const { return available_; }

 private:
  std::map<size_t, size_t> sizes_;  // of the free parts, by offset
  size_t available_;
};

}  // namespace kv
