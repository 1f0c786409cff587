// Launchers of decode attention over 2:4 blocks on CUDA devices. They validate what the host can see, enqueue on
// `stream` and return. Faults of the kernels themselves are reported through the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Queries, cache and output must have the same 16-bit dtype. Pools and rows must begin at multiples of 16 bytes.
bool fits_decode_24(const Attention24Arguments& arguments);

// How many query rows a thread block computes at once: 8 or 16.
int decode_24_rows(const Attention24Arguments& arguments);

// Device memory that a launch needs. Counters are zero before and after it. The workspace's old content does not
// matter. Launches that may run at the same time need memory of their own.
struct DecodeMemory24 {
  size_t counter_bytes;
  size_t workspace_bytes;
};
Status decode_24_memory(const Attention24Arguments& arguments, DecodeMemory24* memory);

// These take what fits_decode_24 accepts and refuse the rest (capability). Index maps, key counts, slots and rows
// need no check before: numbers out of range are reported to `faults`, and nothing is read there.
namespace sm80 {
Status decode_attention_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream);
}  // namespace sm80
namespace sm90a {
Status decode_attention_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream);
}  // namespace sm90a

}  // namespace kv
