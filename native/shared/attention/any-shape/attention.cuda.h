#pragma once

#include "runtime/execution.h"
#include "shared/attention/key-block-lists.h"

namespace kv {

// Prefill and decode attention on any CUDA device, for every dtype and for heads of up to 512 dims. With lists, which
// were checked, rows attend to their blocks alone.
Status attention_any_cuda(const PagedAttentionArguments& arguments, ExecutionContext& context,
                          const KeyBlockLists& lists = {});

}  // namespace kv
