// The samples and their normal equations (lines 1, 9, 11 and 12), in f64.
#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/mma-f64.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kLineThreads = 2 * kWarp;
constexpr int kTile = 128;  // rows and columns of a thread block's part of the normal equations
constexpr int kPart = 32;   // of a warp's
constexpr int kTileThreads = kTile / kPart * (kTile / kPart) * kWarp;
constexpr int kDepth = 16;          // samples at once
constexpr int kStages = 4;          // of which so many are under way
constexpr int kStride = kTile + 4;  // so that a warp reads from all banks

// One thread for each sample and pair.
__global__ void __launch_bounds__(kThreads) draw_samples(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t sample = index / a.pairs;
  const int pair = static_cast<int>(index % a.pairs);
  if (sample >= launch.samples) return;
  const InteriorSample drawn = interior.sample(static_cast<int32_t>(sample), launch.samples, a.seed);
  if (pair == 0) launch.memory.samples[sample] = drawn;
  // r(lag) minus its mean over the interior of the row, in closed form (line 9).
  const double2 turn = turn_of(launch, drawn.row - drawn.key, pair);
  const double half = static_cast<double>(a.inverse_frequencies[pair]) / 2;
  const double count = interior.count(drawn.row);
  const double divisor = sin(half);
  const double size = divisor == 0 ? 1 : sin(count * half) / (count * divisor);
  double sine;
  double cosine;
  sincos((static_cast<double>(interior.diagonal) + (drawn.row - interior.sinks)) * half, &sine, &cosine);
  double* line = launch.memory.angles + sample * 2 * a.pairs;
  line[pair] = turn.x - size * cosine;
  line[a.pairs + pair] = -turn.y + size * sine;
}

// Lines 11 and 12: one warp for each sample and kv head. A lane has kColumns columns of the keys. If kWhole, it has no
// fewer, and every column is a pair. The line of a sample that is not finite is left zero.
template <class T, class Q, int kColumns, bool kWhole>
__global__ void __launch_bounds__(kLineThreads) write_lines(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int sample = static_cast<int>(blockIdx.x) * (kLineThreads / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (sample >= launch.samples) return;
  const InteriorSample drawn = launch.memory.samples[sample];
  const int32_t end = interior.end(drawn.row);
  const int32_t block = end / kTurnTokens;
  const int columns = columns_of(a);
  const StoredKeys<T> keys(a, head);
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int index = lane + kWarp * i;
      if (!kWhole && index >= columns) continue;
      const Column column(a, index);
      body(i, index, column.first, column.second, kWhole || column.second >= 0);
    }
  };
  const auto value_of = [](const auto* from, int first, int second, bool turned) {
    return make_float2(to_float(from[first]), turned ? to_float(from[second]) : 0);
  };

  // The keys of the row's interior that are not in the sums before its last block.
  constexpr int kBatch = kColumns > 2 ? 1 : 4;
  float2 cached[kColumns] = {};
  double2 plain[kColumns] = {};
  const auto walk = [&](int32_t from, int32_t last, auto also_plain) {
    for (; from < last; from += kWarp) {
      const int count = min(last - from, kWarp);
      const T* own = keys.at(from + min(lane, count - 1));
      const float2* turn = launch.memory.turns_of_key + (from - block * kTurnTokens) * a.pairs;
      for (int i = 0; i < count; i += kBatch) {
        float2 values[kBatch][kColumns];
        float2 turns[kBatch][kColumns];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int near = min(i + j, count - 1);
          const auto* key = reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own), near));
          each([&](int c, int index, int first, int second, bool turned) {
            values[j][c] = value_of(key, first, second, turned);
            if constexpr (also_plain.value) turns[j][c] = turned ? turn[near * a.pairs + index] : make_float2(1, 0);
          });
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (i + j >= count) continue;
          each([&](int c, int, int, int, bool) {
            cached[c] = {cached[c].x + values[j][c].x, cached[c].y + values[j][c].y};
            if constexpr (also_plain.value) {
              const float2 before = turned_back(values[j][c], turns[j][c]);
              plain[c] = {plain[c].x + before.x, plain[c].y + before.y};
            }
          });
        }
      }
    }
  };
  const int32_t start = max(block * kTurnTokens, launch.first_key(interior));
  walk(start, end, std::true_type{});
  const bool wide = a.formulas == DecompositionFormulas::paper;
  if (wide) {
    walk(0, interior.sinks, std::false_type{});
    walk(end, drawn.row + 1, std::false_type{});
  }

  // The key of the sample, without the mean over the row's keys; before the rotation, and as it is cached.
  const int32_t walked = max(end - start, 0) + (wide ? interior.sinks + drawn.row + 1 - end : 0);
  const double of_count = 1.0 / interior.count(drawn.row);
  const double of_counted = wide ? 1.0 / (drawn.row + 1) : of_count;
  const double shrink = 1 / static_cast<double>(a.attention_scale);
  const double* sums = launch.key_sums_before(head, block);
  const double* centre = launch.layout().centre(a.state, head);
  const T* key = keys.at(drawn.key);
  double2 regressors[kColumns];
  each([&](int i, int index, int first, int second, bool turned) {
    const float2 own = value_of(key, first, second, turned);
    const float2 middle = {static_cast<float>(centre[first]), turned ? static_cast<float>(centre[second]) : 0};
    const auto without_mean = [&](float value, float from_middle, int dim, float sum) {
      const double all = sums[dim] + (static_cast<double>(sum) - static_cast<double>(from_middle) * walked);
      return value - from_middle - static_cast<float>(all * of_counted);
    };
    cached[i].x = without_mean(own.x, middle.x, first, cached[i].x);
    cached[i].y = turned ? without_mean(own.y, middle.y, second, cached[i].y) : 0;
    double2 before = {own.x, own.y};
    double2 sum = plain[i];
    if (turned) {
      const float2 within = turned_back(own, launch.memory.turns_of_key[drawn.key % kTurnTokens * a.pairs + index]);
      before = turned_back({within.x, within.y}, launch.memory.bases[int64_t{drawn.key / kTurnTokens} * a.pairs + index]);
      sum = turned_back(sum, launch.memory.bases[int64_t{block} * a.pairs + index]);
      before = {before.x * shrink, before.y * shrink};
      sum = {sum.x * shrink, sum.y * shrink};
    }
    regressors[i].x = before.x - (sums[a.head_dim + first] + sum.x) * of_count;
    if (turned) regressors[i].y = before.y - (sums[a.head_dim + second] + sum.y) * of_count;
  });

  double* line = launch.memory.lines + (int64_t{head} * launch.samples + sample) * launch.line_values();
  const int coefficients = a.coefficients();
  const Q* query = query_at<Q>(a, drawn.row - interior.first_row, head * a.group());
  bool finite = true;
#pragma unroll 4
  for (int g = 0; g < a.group(); ++g) {
    float logit = 0;
    each([&](int i, int, int first, int second, bool turned) {
      const float2 own = value_of(query + g * a.query_head_stride, first, second, turned);
      logit += own.x * cached[i].x + own.y * cached[i].y;
    });
    logit = warp_sum(logit) * a.scale;
    finite = finite && isfinite(logit);
    if (lane == 0) line[coefficients + g] = static_cast<double>(logit);
  }
  __syncwarp();
  for (int i = lane; i < 2 * a.pairs; i += kWarp) line[i] = finite ? launch.memory.angles[int64_t{sample} * 2 * a.pairs + i] : 0;
  each([&](int i, int, int first, int second, bool turned) {
    line[2 * a.pairs + first] = finite ? regressors[i].x : 0;
    if (turned) line[2 * a.pairs + second] = finite ? regressors[i].y : 0;
  });
  for (int i = coefficients + lane; i < launch.line_values(); i += kWarp) {
    if (!finite || i >= coefficients + a.group()) line[i] = 0;
  }
}

// The samples of a split are first_of_split(split) .. first_of_split(split + 1) - 1.
__device__ int64_t first_of_split(const Launch& launch, int split) { return int64_t{launch.samples} * split / kSplits; }

// Multiplies lines by lines: one thread block for each tile of the lower triangle, kv head and split. The last rows
// are the right sides.
__global__ void __launch_bounds__(kTileThreads) multiply_lines(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) double shared[];  // [stage, row tile and column tile, kDepth, kStride]
  const int n = launch.a.coefficients();
  const int rows = n + launch.a.group();
  const int values = launch.line_values();
  const int column_tiles = (n + kTile - 1) / kTile;
  int row_tile = 0;
  int column_tile = static_cast<int>(blockIdx.x);
  for (; column_tile >= min(row_tile + 1, column_tiles); ++row_tile) column_tile -= min(row_tile + 1, column_tiles);
  const int head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int top = thread / kWarp / (kTile / kPart) * kPart;
  const int left = thread / kWarp % (kTile / kPart) * kPart;
  const bool idle = row_tile * kTile + top >= rows || row_tile * kTile + top + kPart <= column_tile * kTile + left;
  const double* lines = launch.memory.lines + int64_t{head} * launch.samples * values;
  const int64_t first = first_of_split(launch, split);
  const int64_t end = first_of_split(launch, split + 1);
  const bool square = row_tile == column_tile;  // then rows and columns are the same
  // A thread loads two neighbouring columns of some samples, of the rows' tile and of the columns'.
  constexpr int kLoadDepth = kTileThreads / (kTile / 2);
  const int own_column = thread % (kTile / 2) * 2;
  const int own_depth = thread / (kTile / 2);
  const double* sources[2];
  bool real[2];
  for (int side = 0; side < 2; ++side) {
    const int from = (side == 0 ? row_tile : column_tile) * kTile + own_column;
    real[side] = from < values && !(side == 1 && square);
    sources[side] = real[side] ? lines + from : lines;
  }
  const auto load = [&](int64_t sample) {
    const int stage = static_cast<int>((sample - first) / kDepth % kStages);
    double* to = shared + stage * 2 * kDepth * kStride + own_column;
#pragma unroll
    for (int depth = own_depth; depth < own_depth + kDepth; depth += kLoadDepth) {
      const bool valid = sample + depth < end;
      const int64_t offset = valid ? (sample + depth) * values : 0;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (side == 1 && square) continue;
        ptx::async_copy_16(to + (side * kDepth + depth) * kStride, sources[side] + offset, valid && real[side]);
      }
    }
  };
  double sums[kPart / 16][kPart / 8][4] = {};
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i * kDepth < end) load(first + i * kDepth);
    ptx::async_copy_commit();
  }
  for (int64_t sample = first; sample < end; sample += kDepth) {
    ptx::async_copy_wait<kStages - 2>();
    __syncthreads();
    if (sample + (kStages - 1) * kDepth < end) load(sample + (kStages - 1) * kDepth);
    ptx::async_copy_commit();
    if (idle) continue;
    const int stage = static_cast<int>((sample - first) / kDepth % kStages);
    const double* of_rows = shared + (stage * 2 * kDepth + lane % 4) * kStride + top + lane / 4;
    const double* of_columns = shared + ((stage * 2 + (square ? 0 : 1)) * kDepth + lane % 4) * kStride + left + lane / 4;
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      double row[kPart / 16][4];
      double column[kPart / 8][2];
#pragma unroll
      for (int i = 0; i < kPart / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) row[i][j] = of_rows[(k + j / 2 * 4) * kStride + 16 * i + j % 2 * 8];
      }
#pragma unroll
      for (int i = 0; i < kPart / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) column[i][j] = of_columns[(k + 4 * j) * kStride + 8 * i];
      }
#pragma unroll
      for (int i = 0; i < kPart / 16; ++i) {
        if (row_tile * kTile + top + 16 * i >= rows) continue;
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) ptx::mma_m16n8k8(sums[i][j], row[i], column[j]);
      }
    }
  }
  double* to = launch.memory.gram_parts + (int64_t{split} * launch.a.kv_heads + head) * rows * n;
#pragma unroll
  for (int i = 0; i < kPart / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int row = row_tile * kTile + top + 16 * i + part / 2 * 8 + lane / 4;
        const int column = column_tile * kTile + left + 8 * j + lane % 4 * 2 + part % 2;
        if (row < rows && column < n && column <= row) to[int64_t{row} * n + column] = sums[i][j][part];
      }
    }
  }
}

// Adds this call's part to the sums of earlier calls, and writes the system to solve. An element is in a row of the
// matrix, or in a right side.
__global__ void __launch_bounds__(kThreads) add_up_systems(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const int64_t n = a.coefficients();
  const int64_t rows = n + a.group();
  const int64_t row = blockIdx.x;
  const int64_t head = blockIdx.y;
  const bool matrix = row < n;
  const DecompositionState layout = launch.layout();
  double* kept = matrix ? layout.gram(a.state, head) + row * n : layout.right_side(a.state, head * a.group() + row - n);
  const double* parts = launch.memory.gram_parts + (head * rows + row) * n;
  double* to = launch.memory.systems + (head * rows + row) * n;
  for (int64_t column = threadIdx.x; column < n && (!matrix || column <= row); column += kThreads) {
    double sum = 0;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) sum += launch.samples > 0 ? parts[split * a.kv_heads * rows * n + column] : 0;
    sum = (a.seen_tokens > 0 ? kept[column] : 0) + launch.weight * sum;
    kept[column] = sum;
    to[column] = sum;
  }
}

template <class T, class Q>
void launch_lines(const Launch& launch) {
  constexpr int kLines = kLineThreads / kWarp;
  const dim3 warps(static_cast<unsigned>((launch.samples + kLines - 1) / kLines), launch.kv_heads());
  const bool whole = 2 * launch.a.pairs == launch.a.head_dim;
  const auto kernel = whole && launch.a.pairs == kWarp       ? write_lines<T, Q, 1, true>
                      : whole && launch.a.pairs == 2 * kWarp ? write_lines<T, Q, 2, true>
                                                             : write_lines<T, Q, 8, false>;
  kernel<<<warps, kLineThreads, 0, launch.stream>>>(launch);
}

}  // namespace

Status add_samples(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const int n = a.coefficients();
  if (launch.samples > 0) {
    const int64_t threads = int64_t{launch.samples} * a.pairs;
    draw_samples<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, launch.stream>>>(launch);
    with_cuda_float_type(a.cache_dtype, [&](auto element) {
      with_cuda_float_type(a.query_dtype, [&](auto query) { launch_lines<decltype(element), decltype(query)>(launch); });
    });
    constexpr size_t kBytes = size_t{kStages} * 2 * kDepth * kStride * sizeof(double);
    const cudaError_t error =
        cudaFuncSetAttribute(multiply_lines, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
    if (error != cudaSuccess) return cuda_status(error);
    int tiles = 0;
    for (int row = 0; row * kTile < n + a.group(); ++row) tiles += min(row + 1, (n + kTile - 1) / kTile);
    multiply_lines<<<dim3(static_cast<unsigned>(tiles), launch.kv_heads(), kSplits), kTileThreads, kBytes, launch.stream>>>(launch);
  }
  add_up_systems<<<dim3(static_cast<unsigned>(n + a.group()), launch.kv_heads()), kThreads, 0, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace decomposition
}  // namespace kv
