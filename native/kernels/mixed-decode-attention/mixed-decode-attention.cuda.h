// Launchers of mixed decode attention on CUDA devices. They validate what the host can see, enqueue on `stream` and
// return; faults of the kernels themselves surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/mixed-blocks.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

// Queries, cache and output of one 16-bit dtype, pools and rows of whole 16 bytes.
bool fits_mixed_decode(const MixedAttentionArguments& arguments);

// How many query rows a thread block takes at once: 8 or 16.
int mixed_decode_rows(const MixedAttentionArguments& arguments);

// Device memory that a launch needs. Counters are zero before it and after it; what the workspace holds does not
// matter. Launches that may run at the same time need their own.
struct MixedDecodeMemory {
  size_t counter_bytes;
  size_t workspace_bytes;
};
Status mixed_decode_memory(const MixedAttentionArguments& arguments, MixedDecodeMemory* memory);

// These take what fits_mixed_decode accepts; they refuse the rest (capability). Tables that lead outside the pools are
// reported to `faults` and not followed: index maps, key counts, slots and rows need no check before.
namespace sm80 {
Status mixed_decode_attention(const MixedAttentionArguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream);
}  // namespace sm80
namespace sm90a {
Status mixed_decode_attention(const MixedAttentionArguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream);
}  // namespace sm90a

}  // namespace kv
