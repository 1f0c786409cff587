// Attention of any dtype, head size and block size, with one warp for each query row. It serves whatever the
// tensor-core kernels do not take, and devices that those kernels are not built for.
#include "shared/attention/any-shape/attention.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 4;
constexpr int kLargestDim = 512;
constexpr int kDimsOfLane = kLargestDim / kWarp;

__device__ float warp_maximum(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// The batch entry that row `token` belongs to.
__device__ int32_t entry_of(const PagedBatch& b, int32_t token) {
  int32_t entry = 0;
  while (entry + 1 < b.batch && b.query_start[entry + 1] <= token) ++entry;
  return entry;
}

// The query tile of row `token` of batch entry `entry`, numbered as in the lists.
__device__ int32_t query_tile_of(const PagedBatch& b, int32_t entry, int32_t token) {
  int32_t tile = (token - b.query_start[entry]) / kListedQueryTile;
  for (int32_t before = 0; before < entry; ++before) {
    tile += query_tiles_of(b.query_start[before + 1] - b.query_start[before]);
  }
  return tile;
}

template <class Q, class C, class O>
__global__ void __launch_bounds__(kWarps* kWarp) attend_rows(PagedAttentionArguments a, KeyBlockLists lists) {
  extern __shared__ float queries[];  // [warp, dim], scaled
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int32_t token = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y) * kWarps + warp;
  if (head >= a.query_heads || token < a.query_start[0] || token >= a.query_start[a.batch]) return;
  const int32_t entry = entry_of(a, token);
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head / (a.query_heads / a.kv_heads);
  const int32_t* blocks = a.block_table + cache_head * a.table_width;
  const int32_t rows_behind = a.query_start[entry + 1] - 1 - token;
  const int32_t count = a.key_counts[cache_head];
  const int32_t visible = a.causal ? count - rows_behind : count;

  float* query = queries + warp * a.head_dim;
  const Q* row = static_cast<const Q*>(a.query) + token * a.query_token_stride + head * a.query_head_stride;
  for (int dim = lane; dim < a.head_dim; dim += kWarp) query[dim] = to_float(row[dim]) * a.scale;
  __syncwarp();

  // With lists, `place` counts the keys of all listed blocks, one block after another.
  const bool listed = lists.counts != nullptr;
  const int32_t tile = listed ? query_tile_of(a, entry, token) : 0;
  const int32_t* key_blocks = lists.blocks_of(lists.list(head, tile));
  const int32_t places = listed ? lists.count(head, tile) * kKeyBlockTokens : visible;

  float maximum = -INFINITY;
  float sum = 0;
  float result[kDimsOfLane] = {};
  for (int32_t place = 0; place < places; place += kWarp) {
    const int32_t first =
        listed ? key_blocks[place / kKeyBlockTokens] * kKeyBlockTokens + place % kKeyBlockTokens : place;
    if (first >= visible) break;
    // Each lane scores one key.
    const int32_t key = first + lane;
    float score = -INFINITY;
    int64_t offset = 0;
    if (key < visible) {
      offset = blocks[key / a.block_tokens] * a.block_stride + key % a.block_tokens * a.token_stride;
      const C* keys = static_cast<const C*>(a.keys) + offset;
      score = 0;
      for (int dim = 0; dim < a.head_dim; ++dim) score += query[dim] * to_float(keys[dim]);
    }
    const float higher = fmaxf(maximum, warp_maximum(score));
    const float shrink = expf(maximum - higher);
    const float weight = expf(score - higher);
    maximum = higher;
    sum = sum * shrink + warp_sum(weight);
    // Each lane sums up its dims: lane, lane + 32, …
#pragma unroll
    for (int i = 0; i < kDimsOfLane; ++i) result[i] *= shrink;
    const int32_t keys = visible - first < kWarp ? visible - first : kWarp;
    for (int32_t j = 0; j < keys; ++j) {
      const float w = __shfl_sync(0xffffffffu, weight, j);
      const C* values = static_cast<const C*>(a.values) + __shfl_sync(0xffffffffu, offset, j);
#pragma unroll
      for (int i = 0; i < kDimsOfLane; ++i) {
        if (lane + i * kWarp < a.head_dim) result[i] += w * to_float(values[lane + i * kWarp]);
      }
    }
  }

  O* output = static_cast<O*>(a.output) + token * a.output_token_stride + head * a.output_head_stride;
#pragma unroll
  for (int i = 0; i < kDimsOfLane; ++i) {
    const int dim = lane + i * kWarp;
    if (dim < a.head_dim) output[dim] = from_float<O>(sum == 0.0f ? 0.0f : result[i] / sum);
  }
  if (lane == 0 && a.log_sum_exp != nullptr) {
    a.log_sum_exp[int64_t{token} * a.query_heads + head] = sum == 0.0f ? -INFINITY : maximum + logf(sum);
  }
}

}  // namespace

Status attention_any_cuda(const PagedAttentionArguments& a, ExecutionContext& context, const KeyBlockLists& lists) {
  if (a.query_tokens == 0 || a.batch == 0) return Status::success();
  if (a.head_dim > kLargestDim) {
    return Status::failure(StatusCode::capability,
                           "attention on CUDA takes heads of up to " + std::to_string(kLargestDim) + " dims");
  }
  const dim3 blocks(static_cast<unsigned>(a.query_tokens),
                    static_cast<unsigned>((a.query_heads + kWarps - 1) / kWarps));
  const size_t shared = sizeof(float) * kWarps * static_cast<size_t>(a.head_dim);
  with_cuda_float_type(a.query_dtype, [&](auto query) {
    with_cuda_float_type(a.cache_dtype, [&](auto cached) {
      with_cuda_float_type(a.output_dtype, [&](auto output) {
        attend_rows<decltype(query), decltype(cached), decltype(output)>
            <<<blocks, kWarps * kWarp, shared, stream_of(context)>>>(a, lists);
      });
    });
  });
  return launch_status();
}

}  // namespace kv
