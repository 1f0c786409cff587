// Launchers of block-sparse attention on CUDA devices. They validate what the host can see, enqueue on `stream` and
// return. Tables and lists of the arguments were checked.
#pragma once

#include "kernels/block-sparse-attention/block-sparse-attention-plan.cuda.h"

namespace kv {

// Device memory that a launch needs, to hand out its work. Its content does not matter. Launches that may run at the
// same time need one each.
constexpr size_t kBlockSparseAttentionWorkspaceBytes = 16;

// A block's tokens come in multiples of this on Hopper.
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
