// Block-sparse attention for Ampere and Ada: the attention loop of mma, whose key tiles are the listed blocks.
#include "kernels/block-sparse-attention/block-sparse-attention.cuda.h"
#include "shared/attention/mma/attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"

namespace kv::sm80 {
namespace {

static_assert(kQueryTile == kListedQueryTile && kKeyTile == kKeyBlockTokens);

struct ListedKeyTiles {
  using Arguments = ListedArguments;
  using Work = ListedWork;

  static __device__ int count(const ListedTile& work) { return work.listed; }
  static __device__ int first_key(const ListedTile& work, int place) { return work.blocks[place] * kKeyTile; }
};

template <typename Element>
Status launch_for_head_dim(const ListedArguments& arguments, cudaStream_t stream) {
  const int32_t* values = arguments.block_table;
  if (arguments.head_dim == 64) return launch_attention<Element, 64, ListedKeyTiles>(arguments, values, stream);
  return launch_attention<Element, 128, ListedKeyTiles>(arguments, values, stream);
}

}  // namespace

Status block_sparse_attention(const PagedAttentionArguments& arguments, const ListedPlan& plan, cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, 1)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core block-sparse attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const ListedArguments listed{arguments, plan};
  return arguments.cache_dtype == DType::f16 ? launch_for_head_dim<__half>(listed, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(listed, stream);
}

}  // namespace kv::sm80
