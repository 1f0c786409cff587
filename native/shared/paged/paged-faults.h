// What CUDA kernels may find wrong in the tables of a batch over a paged cache.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/fault.h"

namespace kv {

enum class PagedFault : int32_t {
  rows_not_ascending = 1,  // limit: the number of rows
  slot_out_of_range,       // value: the slot; limit: the number of slots
  cache_overflow,          // value: the slot
  block_out_of_range,      // value: the block
  part_of_block,           // value: the slot; limit: the tokens of a block
  operations_own,          // first code of an operation's own faults
};

std::string describe_paged_fault(const Fault& fault);

}  // namespace kv
