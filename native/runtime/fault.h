// How a kernel on a device says that its data was bad: it writes here, and the stream reads it at its next
// synchronisation. Values on a device cannot be checked before a launch without waiting for them.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"

namespace kv {

enum class FaultCode : int32_t {
  none,
  id_out_of_range,
  rows_not_ascending,
  slot_out_of_range,
  slot_twice,
  cache_overflow,
  block_out_of_range,
  selection_not_ascending,
  too_many_scores,
  selection_row,
  unordered_logit,
  no_finite_logit,
  recent_outside,
  pruning_out_of_range,
};

struct Fault {
  FaultCode code = FaultCode::none;
  int64_t value = 0;  // the id, slot, block, kv head or token that is at fault
  int64_t row = 0;    // of the operation's rows
  int64_t limit = 0;  // what the value should have been less than
  const char* operation = nullptr;
  int32_t claimed = 0;  // 1 once a thread has begun to report: the first of several faults is kept
};

inline std::string describe(const Fault& fault) {
  const std::string value = std::to_string(fault.value);
  const std::string row = "row " + std::to_string(fault.row) + ": ";
  switch (fault.code) {
    case FaultCode::id_out_of_range:
      return "ids[" + std::to_string(fault.row) + "] is " + value + "; the table has " + std::to_string(fault.limit) +
             " rows, numbered from 0";
    case FaultCode::rows_not_ascending:
      return "the rows of the batch entries do not ascend from 0 to at most " + std::to_string(fault.limit);
    case FaultCode::slot_out_of_range:
      return "a batch entry names slot " + value + ", but slots are 0 to " + std::to_string(fault.limit - 1);
    case FaultCode::slot_twice:
      return "slot " + value + " is named twice in one batch, by entries that both have rows";
    case FaultCode::cache_overflow:
      return "slot " + value + " counts more keys than its block table holds: give it a wider table";
    case FaultCode::block_out_of_range:
      return "the block table names block " + value + ", which the pool does not have";
    case FaultCode::selection_not_ascending:
      return "the selection of kv head " + value + " does not ascend within what the slot holds";
    case FaultCode::too_many_scores:
      return "kv head " + std::to_string(fault.row) + " holds " + value +
             " keys before the window, but there is room for " + std::to_string(fault.limit) + " scores";
    case FaultCode::selection_row:
      return row + "its tokens or sizes contradict each other or exceed the scores or the " +
             std::to_string(fault.limit) + " indices that there is room for";
    case FaultCode::unordered_logit:
      return row + "the score of token " + value + " is NaN or infinite; the model's output is broken";
    case FaultCode::no_finite_logit:
      return row + "every logit is -infinity; leave at least one token possible";
    case FaultCode::recent_outside:
      return row + "recent token " + value + " is not one of the " + std::to_string(fault.limit) + " of the model";
    case FaultCode::pruning_out_of_range:
      return "pruning " + row + "asks for " + value + " of " + std::to_string(fault.limit) +
             ", or for a range, ids or freed blocks that do not fit them";
    default:
      return "";
  }
}

#ifdef __CUDACC__
__device__ inline void report_fault(FaultSink sink, FaultCode code, int64_t value, int64_t row = 0,
                                    int64_t limit = 0) {
  if (atomicCAS(&sink.fault->claimed, 0, 1) != 0) return;
  sink.fault->value = value;
  sink.fault->row = row;
  sink.fault->limit = limit;
  sink.fault->operation = sink.operation;
  __threadfence_system();
  sink.fault->code = code;
}
#endif

}  // namespace kv
