// How a kernel on a device reports that its data was bad: the kernel writes a fault, and the stream reads it at its
// next synchronisation. Values on a device cannot be checked before a launch without waiting for them.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"

namespace kv {

struct Fault {
  int32_t code = 0;   // of the operation's own enumeration, which begins at 1; 0 means no fault
  int64_t value = 0;  // the id, slot, block, kv head or token that is at fault
  int64_t row = 0;    // which row of the operation
  int64_t limit = 0;  // the value should have been less than this
  const char* operation = nullptr;
  FaultText text = nullptr;
  int32_t claimed = 0;  // 1 once a thread has begun to report, so that the first of several faults is kept
};

#ifdef __CUDACC__
template <class Code>
__device__ inline void report_fault(FaultSink sink, Code code, int64_t value, int64_t row = 0, int64_t limit = 0) {
  if (atomicCAS(&sink.fault->claimed, 0, 1) != 0) return;
  sink.fault->value = value;
  sink.fault->row = row;
  sink.fault->limit = limit;
  sink.fault->operation = sink.operation;
  sink.fault->text = sink.text;
  __threadfence_system();
  sink.fault->code = static_cast<int32_t>(code);
}
#endif

}  // namespace kv
