// What the host checks of lists of key blocks on the CPU, checked on a CUDA device, whose memory the host cannot read.
#pragma once

#include <cstddef>

#include "runtime/execution.h"
#include "shared/attention/key-block-lists.h"

namespace kv {

// A multiple of 256, so that other working memory may follow.
size_t checked_lists_bytes(const PagedAttentionArguments& arguments, const KeyBlockLists& lists);

// Gives the lists other counts, in `memory` of checked_lists_bytes, which the device fills: a list that is none counts no
// blocks there, and is a fault of the stream. The tables of the arguments were checked.
Status check_lists_cuda(const PagedAttentionArguments& arguments, void* memory, ExecutionContext& context,
                        KeyBlockLists* lists);

}  // namespace kv
