// Launcher of decode attention on CUDA devices. It validates what the host can see, enqueues on `stream` and
// returns; faults of the kernel itself surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// A block's tokens come in multiples of this.
constexpr int kDecodeBlockMultiple = 16;

namespace cuda {

// Device memory that a launch needs. Counters are zero before it and after it; what the workspace holds does
// not matter. Launches that may run at the same time need their own.
struct DecodeAttentionMemory {
  size_t counter_bytes;
  size_t workspace_bytes;
};
Status decode_attention_memory(const PagedAttentionArguments& arguments, DecodeAttentionMemory* memory);

// The arguments' block table names the blocks of keys, `value_table`, of the same shape and often the same, those of
// values. Made for few queries in each batch entry. Takes what fits_tensor_cores(arguments, kDecodeBlockMultiple)
// accepts; refuses the rest (capability). Tables that lead outside are reported to `faults`, and not followed.
Status decode_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* counters,
                        void* workspace, FaultSink faults, cudaStream_t stream);

}  // namespace cuda
}  // namespace kv
