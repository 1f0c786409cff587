// Writes entries of a table:
//   table[at[i]] = entries[i]   for every i.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct WriteEntriesArguments {
  int32_t* table = nullptr;
  // Both on the device. No place occurs twice in `at`, so the order of the writes does not matter.
  const int32_t* at = nullptr;       // [count]
  const int32_t* entries = nullptr;  // [count]
  int32_t count = 0;
};

Status write_entries(const WriteEntriesArguments& arguments, ExecutionContext& context);

}  // namespace kv
