// Copies block index maps (HieraSparse, section III-B), of keys and of values. Entries whose block was copied name
// the copy:
//   target[i] = to[k] if from[k] == source[i] for some k, else source[i].
// Source and target may be the same.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct CopyIndexMapArguments {
  // [kv_head, block]: entries of any kind (block-entry.h).
  const int32_t* source[2] = {};
  int32_t* target[2] = {};
  int32_t kv_heads = 0;
  int32_t table_width = 0;
  // Entries. `from` is strictly ascending.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

Status copy_index_map(const CopyIndexMapArguments& arguments, ExecutionContext& context);

// The target's entry for the source's `entry`. Static, so that each instruction set has its own copy.
static constexpr int32_t copied_entry(const CopyIndexMapArguments& a, int32_t entry) {
  // Most entries of a long sequence name no block that was copied. This test finds many of them fast.
  if (a.copies == 0 || entry < a.from[0] || entry > a.from[a.copies - 1]) return entry;
  int32_t first = 0;
  int32_t end = a.copies;
  while (first < end) {
    const int32_t middle = first + (end - first) / 2;
    if (a.from[middle] < entry) first = middle + 1;
    else end = middle;
  }
  return a.from[first] == entry ? a.to[first] : entry;
}

}  // namespace kv
