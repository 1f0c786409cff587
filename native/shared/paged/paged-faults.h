// What CUDA kernels over a paged cache may find wrong in a batch's tables.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/fault.h"

namespace kv {

enum class PagedFault : int32_t {
  rows_not_ascending = 1,  // limit: the rows that there are
  slot_out_of_range,       // value: the slot; limit: the slots that there are
  cache_overflow,          // value: the slot
  block_out_of_range,      // value: the block
  operations_own,          // and what follows: an operation's own faults
};

std::string describe_paged_fault(const Fault& fault);

}  // namespace kv
