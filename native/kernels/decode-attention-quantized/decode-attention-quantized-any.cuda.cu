// Decode attention over quantized blocks of any dtype of rows and any head of up to 512 dims, with one warp for each
// query row. It serves whatever the tensor-core kernel does not take.
#include "kernels/decode-attention-quantized/decode-attention-quantized.cuda.h"
#include "shared/attention/part-weights.cuda.h"
#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMostGroups = kMostQuantizedDims / kQuantizedGroupDims;

__device__ float warp_maximum(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Blocks of keys, or of values.
struct Codes {
  const uint8_t* pool;
  int head_dim;
  int bits;

  __device__ const uint8_t* block(int32_t number) const { return pool + number * quantized_block_bytes(head_dim, bits); }
  __device__ static float scale(const uint8_t* block, int64_t offset, int groups, int token, int group) {
    return scale_of(block[offset + token * groups + group]);
  }
  // What the code of dim `lane` of a group stands for, over the group's step.
  __device__ float code(const uint8_t* block, int row_bytes, int token, int group, int lane) const {
    const uint8_t* codes = block + token * row_bytes + group * kQuantizedGroupDims * bits / 8;
    if (bits == 8) return static_cast<int8_t>(codes[lane]);
    return static_cast<float>(codes[lane % 16] >> lane / 16 * 4 & 15) - 7.5f;
  }
};

template <class Q, class O>
__global__ void __launch_bounds__(kWarps* kWarp) attend_rows(const __grid_constant__ QuantizedAttentionArguments a) {
  __shared__ float queries[kWarps][kMostQuantizedDims];  // rotated and scaled
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int32_t token = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y) * kWarps + warp;
  if (head >= a.query_heads || token < a.query_start[0] || token >= a.query_start[a.batch]) return;
  int32_t entry = 0;
  while (a.query_start[entry + 1] <= token) ++entry;
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head / (a.query_heads / a.kv_heads);
  const int32_t* blocks = a.block_table + cache_head * a.table_width;
  const int32_t count = a.key_counts[cache_head];
  const int groups = quantized_groups(a.head_dim);
  const Codes keys{static_cast<const uint8_t*>(a.keys), a.head_dim, a.key_bits};
  const Codes values{static_cast<const uint8_t*>(a.values), a.head_dim, a.value_bits};
  const int64_t key_scales = scale_offset(a.head_dim, a.key_bits);
  const int64_t value_scales = scale_offset(a.head_dim, a.value_bits);
  const int key_bytes = code_row_bytes(a.head_dim, a.key_bits);
  const int value_bytes = code_row_bytes(a.head_dim, a.value_bits);

  const Q* from = static_cast<const Q*>(a.query) + token * a.query_token_stride + head * a.query_head_stride;
  float row[kMostGroups];
#pragma unroll
  for (int g = 0; g < kMostGroups; ++g) {
    const int dim = g * kWarp + lane;
    row[g] = dim < a.head_dim ? to_float(from[dim]) : 0.0f;
  }
  rotate(row, a.head_dim);
#pragma unroll
  for (int g = 0; g < kMostGroups; ++g) queries[warp][g * kWarp + lane] = row[g] * a.scale;
  __syncwarp();

  float maximum = -INFINITY;
  float sum = 0;
  float result[kMostGroups] = {};
  // Each lane scores one of 32 keys, and sums up its dims of their values. Counts are whole blocks.
  for (int32_t first = 0; first < count; first += kWarp) {
    const int32_t number = blocks[first / kQuantizedBlockTokens];
    const int first_token = first % kQuantizedBlockTokens;
    const uint8_t* key_block = keys.block(number);
    float score = 0;
    for (int g = 0; g < groups; ++g) {
      float product = 0;
      for (int d = 0; d < kQuantizedGroupDims; ++d) {
        const float query = queries[warp][g * kWarp + d];
        product += query * keys.code(key_block, key_bytes, first_token + lane, g, d);
      }
      score += product * Codes::scale(key_block, key_scales, groups, first_token + lane, g);
    }
    const float higher = fmaxf(maximum, warp_maximum(score));
    const float shrink = expf(maximum - higher);
    const float weight = expf(score - higher);
    maximum = higher;
    sum = sum * shrink + warp_sum(weight);
#pragma unroll
    for (float& dim : result) dim *= shrink;
    const uint8_t* value_block = values.block(number);
    for (int j = 0; j < kWarp; ++j) {
      const float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
      for (int g = 0; g < kMostGroups; ++g) {
        if (g >= groups) break;
        result[g] += w * (values.code(value_block, value_bytes, first_token + j, g, lane) *
                          Codes::scale(value_block, value_scales, groups, first_token + j, g));
      }
    }
  }

  // Codes of 4 bits give dims that are not there a value, which the rotation never mixes with the others.
#pragma unroll
  for (float& dim : result) dim = sum == 0.0f ? 0.0f : dim / sum;
  rotate_back(result, a.head_dim);
  O* output = static_cast<O*>(a.output) + token * a.output_token_stride + head * a.output_head_stride;
  float* log_sum_exp = a.log_sum_exp == nullptr ? nullptr : a.log_sum_exp + int64_t{token} * a.query_heads + head;
  const float own = sum == 0.0f ? -INFINITY : maximum + logf(sum);
  if (a.merge && own == -INFINITY) return;
  const PartWeights weights = a.merge ? part_weights(*log_sum_exp, own) : PartWeights{0.0f, 1.0f, own};
  __syncwarp();  // all lanes have read it before one writes it
#pragma unroll
  for (int g = 0; g < kMostGroups; ++g) {
    const int dim = g * kWarp + lane;
    if (dim >= a.head_dim) break;
    const float all = a.merge ? to_float(output[dim]) * weights.own + result[g] * weights.other : result[g];
    output[dim] = from_float<O>(all);
  }
  if (lane == 0 && log_sum_exp != nullptr) *log_sum_exp = weights.log_sum_exp;
}

}  // namespace

Status decode_attention_quantized_any(const QuantizedAttentionArguments& a, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(a.query_tokens),
                    static_cast<unsigned>((a.query_heads + kWarps - 1) / kWarps));
  with_cuda_float_type(a.query_dtype, [&](auto query) {
    with_cuda_float_type(a.output_dtype, [&](auto output) {
      attend_rows<decltype(query), decltype(output)><<<blocks, kWarps * kWarp, 0, stream>>>(a);
    });
  });
  return launch_status();
}

}  // namespace kv::cuda
