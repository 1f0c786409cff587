// Lines 11 and 12 but for the angles, for heads of 64 or 128 dims in a 16-bit dtype, all of whose dims are rotated.
#include "kernels/decompose-attention/decompose-attention-lane-columns.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kHeadsAhead = 4;  // query heads whose elements are loaded ahead
constexpr int kLineWarps = 4;   // few: where a block has few samples, several thread blocks wait less
constexpr int kLineThreads = kLineWarps * kWarp;

// The samples of one block and kv head. A warp has a sample. The line of a sample that is not finite is left zero.
template <class T, int kColumns>
__global__ void __launch_bounds__(kLineThreads, 4) write_lines(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) char shared[];
  const DecomposeAttentionArguments& a = launch.a;
  const int32_t first_sample = launch.memory.first_samples[blockIdx.x];
  const int32_t end_sample = launch.memory.first_samples[blockIdx.x + 1];
  if (first_sample == end_sample) return;
  constexpr int kPairs = kColumns * kWarp;
  const Interior interior(a);
  const int32_t block = interior.end(interior.first_row) / kTurnTokens + static_cast<int32_t>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int own = lane * kColumns;  // the lane's first column
  const StoredKeys<T> keys(a, head);
  const KeyBlock<T> here(a, shared);
  const LaneColumns<T, kColumns> columns(a);
  using Row = typename LaneColumns<T, kColumns>::Row;
  const int32_t start = block * kTurnTokens;
  const int first = max(launch.first_key(interior) - start, 0);
  const int last = min(a.tokens - start, kTurnTokens);
  copy_aligned_block(keys, start, first, last, here.keys, 2 * kPairs, kLineThreads);

  // What a sample needs comes from memory while others are computed.
  InteriorSample drawn_next = launch.memory.samples[min(first_sample + warp, end_sample - 1)];
  InteriorSample drawn;
  Row key_next;
  Row queries_next[kHeadsAhead];
  const auto fetch = [&](int32_t following) {
    drawn = drawn_next;
    key_next = columns.load(keys.at(drawn.key));
    const T* query = query_at<T>(a, drawn.row - interior.first_row, head * a.group());
#pragma unroll
    for (int g = 0; g < kHeadsAhead; ++g) queries_next[g] = columns.load(query + min(g, a.group() - 1) * a.query_head_stride);
    drawn_next = launch.memory.samples[min(following, end_sample - 1)];
  };
  fetch(first_sample + warp + kLineWarps);

  ptx::async_copy_wait<0>();
  __syncthreads();
  add_up_lanes(launch, columns, here, first, last);
  __syncthreads();
  here.add_up_groups();
  double2 cached_before[kColumns];  // the sums over all keys before the block
  double2 plain_before[kColumns];
  double2 base[kColumns];  // by which the block is rotated
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const double* sums = launch.key_sums_before(head, block);
    const Column column(a, own + i);
    cached_before[i] = {sums[column.first], sums[column.second]};
    plain_before[i] = {sums[a.head_dim + column.first], sums[a.head_dim + column.second]};
    base[i] = launch.memory.bases[int64_t{block} * kPairs + own + i];
  }
  __syncthreads();

  const double shrink = 1 / static_cast<double>(a.attention_scale);
  for (int32_t sample = first_sample + warp; sample < end_sample; sample += kLineWarps) {
    const InteriorSample own_sample = drawn;
    const Row key = key_next;
    Row queries[kHeadsAhead];
#pragma unroll
    for (int g = 0; g < kHeadsAhead; ++g) queries[g] = queries_next[g];
    float2 turn[kColumns];
    double2 key_base[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      turn[i] = launch.memory.turns_of_key[own_sample.key % kTurnTokens * kPairs + own + i];
      key_base[i] = launch.memory.bases[int64_t{own_sample.key / kTurnTokens} * kPairs + own + i];
    }
    fetch(sample + 2 * kLineWarps);

    // The keys of the row's interior that are not in the sums before its last block.
    const int end = interior.end(own_sample.row) - start;
    const int group = end / kGroupKeys;
    LaneSums<kColumns> sums;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sums.cached[i] = here.cached[group * kPairs + own + i];
      sums.plain[i] = here.plain[group * kPairs + own + i];
    }
#pragma unroll 1
    for (int from = group * kGroupKeys; from < end; from += kKeysAtOnce) sums.add(launch, columns, here, from, first, end);

    // The key of the sample, without the mean over the row's keys; before the rotation, and as it is cached. The sum of
    // keys that are all the same is taken from just as many times the key, so that nothing is left of them.
    const double count = interior.count(own_sample.row);
    const double of_count = 1.0 / count;
    float2 values[kColumns];
    columns.unpack(key, values);
    float2 centred[kColumns];
    double2 regressors[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const auto without_mean = [&](float value, double before, float sum) {
        return value - static_cast<float>((before + static_cast<double>(sum)) * of_count);
      };
      centred[i] = {without_mean(values[i].x, cached_before[i].x, sums.cached[i].x),
                    without_mean(values[i].y, cached_before[i].y, sums.cached[i].y)};
      const float2 within = turned_back(values[i], turn[i]);
      const double2 before = turned_back({within.x, within.y}, key_base[i]);
      const double2 sum = turned_back(sums.plain[i], base[i]);
      const auto without_plain_mean = [&](double value, double sum_before, double last_keys) {
        return fma(value, count, -(sum_before + last_keys)) * (of_count * shrink);
      };
      regressors[i] = {without_plain_mean(before.x, plain_before[i].x, sum.x),
                       without_plain_mean(before.y, plain_before[i].y, sum.y)};
    }

    double* line = launch.memory.lines + (int64_t{head} * launch.samples + sample) * launch.line_values();
    const T* query = query_at<T>(a, own_sample.row - interior.first_row, head * a.group());
    bool finite = true;
    for (int first_head = 0; first_head < a.group(); first_head += kHeadsAhead) {
      float logits[kHeadsAhead];
#pragma unroll
      for (int g = 0; g < kHeadsAhead; ++g) {
        const int query_head = min(first_head + g, a.group() - 1);
        float2 of_query[kColumns];
        columns.unpack(first_head == 0 ? queries[g] : columns.load(query + query_head * a.query_head_stride), of_query);
        logits[g] = 0;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) logits[g] += of_query[i].x * centred[i].x + of_query[i].y * centred[i].y;
      }
#pragma unroll
      for (int g = 0; g < kHeadsAhead; ++g) {
        const float logit = warp_sum(logits[g]) * a.scale;
        finite = finite && isfinite(logit);
        if (lane == 0 && first_head + g < a.group()) line[launch.sides_at() + first_head + g] = static_cast<double>(logit);
      }
    }
    __syncwarp();
    if (!finite) {
#pragma unroll
      for (double2& regressor : regressors) regressor = {0, 0};
    }
    columns.store(line, regressors);
    for (int i = launch.sides_at() + lane; i < launch.line_values(); i += kWarp) {
      if (!finite || i >= launch.sides_at() + a.group()) line[i] = 0;
    }
    if (lane != 0) continue;
    launch.memory.kept[int64_t{head} * launch.samples + sample] = finite;
    if (!finite) launch.memory.left_out[head] = 1;
  }
}

template <class T>
Status launch_lines(const Launch& launch) {
  const auto kernel = launch.a.pairs == kWarp ? write_lines<T, 1> : write_lines<T, 2>;
  const size_t bytes = KeyBlock<T>::bytes(launch.a);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return cuda_status(error);
  const dim3 blocks(static_cast<unsigned>(launch.sampled_blocks(Interior(launch.a))), launch.kv_heads());
  kernel<<<blocks, kLineThreads, bytes, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace

Status write_whole_lines(const Launch& launch) {
  return launch.a.cache_dtype == DType::f16 ? launch_lines<__half>(launch) : launch_lines<__nv_bfloat16>(launch);
}

}  // namespace decomposition
}  // namespace kv
