// Launchers of decode attention over quantized blocks on CUDA devices. They validate what the host can see, enqueue on
// `stream` and return. Faults of the kernels themselves are reported through the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/decode-attention-quantized/decode-attention-quantized.h"
#include "shared/attention/decode/span-launch.cuda.h"

namespace kv::cuda {

// Queries and outputs have the same 16-bit dtype. Heads have 64 or 128 dims. Rows and pools begin at multiples of 16
// bytes.
bool fits_decode_attention_quantized(const QuantizedAttentionArguments& arguments);

Status decode_attention_quantized_memory(const QuantizedAttentionArguments& arguments, DecodeAttentionMemory* memory);

// Takes what fits_decode_attention_quantized accepts and refuses the rest (capability). Numbers out of range in the
// tables are reported to `faults`, and nothing is read there.
Status decode_attention_quantized(const QuantizedAttentionArguments& arguments, void* counters, void* workspace,
                                  FaultSink faults, cudaStream_t stream);

// Any heads of up to 512 dims and any dtypes. The tables must have been checked.
Status decode_attention_quantized_any(const QuantizedAttentionArguments& arguments, cudaStream_t stream);

}  // namespace kv::cuda
