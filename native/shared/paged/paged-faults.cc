#include "shared/paged/paged-faults.h"

namespace kv {

std::string describe_paged_fault(const Fault& fault) {
  const std::string value = std::to_string(fault.value);
  switch (static_cast<PagedFault>(fault.code)) {
    case PagedFault::rows_not_ascending:
      return "the rows of the batch entries do not ascend from 0 to at most " + std::to_string(fault.limit);
    case PagedFault::slot_out_of_range:
      return "a batch entry names slot " + value + ", but slots are 0 to " + std::to_string(fault.limit - 1);
    case PagedFault::cache_overflow:
      return "slot " + value + " counts more keys than its block table holds: give it a wider table";
    case PagedFault::part_of_block:
      return "slot " + value + " counts keys that are no whole blocks: give a multiple of " + std::to_string(fault.limit);
    default:
      return "the block table names block " + value + ", which the pool does not have";
  }
}

}  // namespace kv
