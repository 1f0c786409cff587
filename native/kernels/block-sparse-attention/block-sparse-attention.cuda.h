// Launchers of block-sparse attention on CUDA devices. They validate what the host can see, enqueue on `stream` and
// return. The tables and lists of the arguments must be checked before.
#pragma once

#include "kernels/block-sparse-attention/block-sparse-attention-plan.cuda.h"

namespace kv {

// A launch needs this much device memory to hand out its work. The content does not matter. Launches that may run at
// the same time need separate memory.
constexpr size_t kBlockSparseAttentionWorkspaceBytes = 16;

// On Hopper the number of tokens of a cache block must be a multiple of this.
constexpr int kBlockSparseBlockMultiple = 8;

namespace sm90a {

// Takes what fits_tensor_cores(arguments, kBlockSparseBlockMultiple) accepts; refuses the rest (capability).
Status block_sparse_attention(const PagedAttentionArguments& arguments, const ListedPlan& plan, void* workspace,
                              cudaStream_t stream);

}  // namespace sm90a

namespace sm80 {

// Takes what fits_tensor_cores(arguments, 1) accepts; refuses the rest (capability). Needs no workspace.
Status block_sparse_attention(const PagedAttentionArguments& arguments, const ListedPlan& plan, cudaStream_t stream);

}  // namespace sm80
}  // namespace kv
