// How a kernel on a device says that its data was bad: it writes here, and the stream reads it at its next
// synchronisation. Values on a device cannot be checked before a launch without waiting for them.
#pragma once

#include <cstdint>
#include <string>

namespace kv {

enum class FaultCode : int32_t { none, id_out_of_range, cache_overflow, block_out_of_range, selection_not_ascending, not_a_number };

struct Fault {
  FaultCode code = FaultCode::none;
  int32_t value = 0;  // the id, slot, block, kv head or row that is at fault
};

inline std::string describe(const Fault& fault) {
  const std::string value = std::to_string(fault.value);
  switch (fault.code) {
    case FaultCode::id_out_of_range:
      return "id " + value + " is not a row of the table";
    case FaultCode::cache_overflow:
      return "slot " + value + " has no room in its block table for the new tokens";
    case FaultCode::block_out_of_range:
      return "the block table names block " + value + ", which the pool does not have";
    case FaultCode::selection_not_ascending:
      return "the selection of kv head " + value + " does not ascend within what the slot holds";
    case FaultCode::not_a_number:
      return "row " + value + " holds a value that is not a number";
    default:
      return "";
  }
}

#ifdef __CUDACC__
// Any one of several faults is enough to report.
__device__ inline void report_fault(Fault* fault, FaultCode code, int32_t value) {
  fault->value = value;
  __threadfence_system();
  fault->code = code;
}
#endif

}  // namespace kv
