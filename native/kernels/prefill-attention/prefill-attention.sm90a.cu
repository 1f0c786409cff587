// Prefill attention for Hopper: the attention loop over all keys that the queries see.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/attention/hopper/attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"

namespace kv::sm90a {
namespace {

template <typename Element, int kHeadDim>
Status launch(const SplitTableArguments& arguments, void* workspace, cudaStream_t stream) {
  using Shape = AttentionShape<Element, kHeadDim>;
  using KeyTiles = ContiguousKeyTiles<Shape::kQueryTile, Shape::kKeyTile>;
  return launch_attention<Shape, KeyTiles>(arguments, workspace, stream);
}

template <typename Element>
Status launch_for_head_dim(const SplitTableArguments& arguments, void* workspace, cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Element, 64>(arguments, workspace, stream)
                                  : launch<Element, 128>(arguments, workspace, stream);
}

}  // namespace

Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* workspace,
                         cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, kPrefillBlockMultiple)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core prefill attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const SplitTableArguments split{arguments, value_table};
  return arguments.cache_dtype == DType::f16 ? launch_for_head_dim<__half>(split, workspace, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(split, workspace, stream);
}

}  // namespace kv::sm90a
