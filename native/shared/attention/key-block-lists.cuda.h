// Checks lists of key blocks on a CUDA device, where the host cannot read them.
#pragma once

#include <cstddef>

#include "runtime/execution.h"
#include "shared/attention/key-block-lists.h"

namespace kv {

// A multiple of 256, so that other working memory may follow.
size_t checked_lists_bytes(const PagedAttentionArguments& arguments, const KeyBlockLists& lists);

// Replaces the counts of the lists by checked ones, in `memory` of checked_lists_bytes, which the device fills. An
// invalid list counts no blocks there, and is a fault of the stream. The tables of the arguments must be checked
// before.
Status check_lists_cuda(const PagedAttentionArguments& arguments, void* memory, ExecutionContext& context,
                        KeyBlockLists* lists);

}  // namespace kv
