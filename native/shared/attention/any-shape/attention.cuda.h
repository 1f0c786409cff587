#pragma once

#include "runtime/execution.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Prefill and decode attention on any CUDA device, for every dtype and for heads of up to 512 dims.
Status attention_any_cuda(const PagedAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
