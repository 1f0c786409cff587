// Launchers of decode attention over 2:4 blocks on CUDA devices. They validate what the host can see, enqueue on `stream` and
// return; faults of the kernels themselves surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Queries, cache and output of one 16-bit dtype, pools and rows of whole 16 bytes.
bool fits_decode_24(const Attention24Arguments& arguments);

// How many query rows a thread block takes at once: 8 or 16.
int decode_24_rows(const Attention24Arguments& arguments);

// Device memory that a launch needs. Counters are zero before it and after it; what the workspace holds does not
// matter. Launches that may run at the same time need their own.
struct DecodeMemory24 {
  size_t counter_bytes;
  size_t workspace_bytes;
};
Status decode_24_memory(const Attention24Arguments& arguments, DecodeMemory24* memory);

// These take what fits_decode_24 accepts; they refuse the rest (capability). Tables that lead outside the pools are
// reported to `faults` and not followed: index maps, key counts, slots and rows need no check before.
namespace sm80 {
Status decode_attention_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream);
}  // namespace sm80
namespace sm90a {
Status decode_attention_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream);
}  // namespace sm90a

}  // namespace kv
