// Launcher of decode attention on CUDA devices. It validates what the host can see, enqueues on `stream` and returns.
// Faults of the kernel itself are reported through the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/attention/decode/span-launch.cuda.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// The tokens of a block must be a multiple of this.
constexpr int kDecodeBlockMultiple = 16;

namespace cuda {

Status decode_attention_memory(const PagedAttentionArguments& arguments, DecodeAttentionMemory* memory);

// Made for few queries in each batch entry. The arguments' block table names the blocks of keys. `value_table` names
// those of values; it has the same shape, and is often the same table. Takes what fits_tensor_cores(arguments,
// kDecodeBlockMultiple) accepts and refuses the rest (capability). Numbers out of range in the tables are reported to
// `faults`, and nothing is read there.
Status decode_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* counters,
                        void* workspace, FaultSink faults, cudaStream_t stream);

}  // namespace cuda
}  // namespace kv
