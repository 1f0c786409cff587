// Which parts of a range are free. Takes the first that fits; parts that come back join their free neighbours.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace kv {

class FreeRanges {
 public:
  explicit FreeRanges(size_t size);

  // The offset of a part; nothing when there is no room for it in one piece.
  std::optional<size_t> take(size_t size);
  void give_back(size_t offset, size_t size);

  size_t available() const { return available_; }

 private:
  std::map<size_t, size_t> sizes_;  // by offset
  size_t available_;
};

}  // namespace kv
