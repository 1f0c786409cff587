// Prefill attention for Ampere and Ada: the attention loop of mma over all keys that the queries see.
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/attention/mma/attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"

namespace kv::sm80 {
namespace {

struct EveryKeyTile {
  using Arguments = PagedAttentionArguments;
  using Work = PrefillWork<kQueryTile, kKeyTile>;

  static __device__ int count(const PrefillTile& work) { return work.key_tiles; }
  static __device__ int first_key(const PrefillTile&, int key_tile) { return key_tile * kKeyTile; }
};

template <typename Element>
Status launch_for_head_dim(const PagedAttentionArguments& arguments, const int32_t* value_table,
                           cudaStream_t stream) {
  if (arguments.head_dim == 64) return launch_attention<Element, 64, EveryKeyTile>(arguments, value_table, stream);
  return launch_attention<Element, 128, EveryKeyTile>(arguments, value_table, stream);
}

}  // namespace

Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table,
                         cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, 1)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core prefill attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  return arguments.cache_dtype == DType::f16
             ? launch_for_head_dim<__half>(arguments, value_table, stream)
             : launch_for_head_dim<__nv_bfloat16>(arguments, value_table, stream);
}

}  // namespace kv::sm80
