// Antidiagonal block scores on a CUDA device. A thread block has 128 strided rows of one query head, which are S tiles. It
// goes over all strided keys twice: first for each row's denominator, then for the shares.
#include "kernels/antidiagonal-block-scores/antidiagonal-block-scores.h"

#include "shared/block-scores/block-scores.cuda.h"

namespace kv {
namespace {

using namespace block_scores;

struct Launch {
  AntidiagonalBlockScoresArguments a;
  const int32_t* fits;
};

// The strided rows of a thread block. Tile t has those from t * 128 / S on.
template <int kStride>
struct Band {
  const BlockScoresArguments& a;
  ScoredTile first;  // the first tile
  int rows;          // of the entry, from the band's first on

  static constexpr int kRowsOfTile = kScoredTileRows / kStride;
  static constexpr int kKeysOfBlock = kScoredBlockKeys / kStride;

  __device__ Band(const BlockScoresArguments& arguments, int64_t query_head, int tile)
      : a(arguments), first(arguments, query_head, tile), rows(first.tokens - first.position) {}

  __device__ int strided_rows() const { return min(Products::kRows, (rows + kStride - 1) / kStride); }
  // How many strided keys the strided row sees.
  __device__ int visible(int row) const { return (first.position + row * kStride) / kStride + 1; }
  __device__ bool sees(int row, int key) const { return row < strided_rows() && key < visible(row); }
  __device__ int most_visible() const { return visible(strided_rows() - 1); }

  // Logits without their factor, of 64 strided keys from `first_key` on.
  template <class Q, class K>
  __device__ Products products(Products::Shared& shared, int first_key) const {
    Products products;
    products.add(
        shared, kStride * a.head_dim,
        [&](int k) {
          const int i = k / a.head_dim;
          return [this, i, d = k - i * a.head_dim](int row) {
            const int own = row * kStride + kStride - 1 - i;
            return own < rows ? to_float(query_at<Q>(a, first.first_row + own, first.query_head)[d]) : 0.0f;
          };
        },
        [&](int k) {
          const int i = k / a.head_dim;
          return [this, first_key, i, d = k - i * a.head_dim](int column) {
            const int key = (first_key + column) * kStride + i;
            return key < first.tokens ? to_float(key_at<K>(a, first.blocks, key)[d]) : 0.0f;
          };
        });
    return products;
  }
};

template <class Q, class K, int kStride>
__global__ void __launch_bounds__(kThreads) score_bands(const __grid_constant__ Launch launch) {
  using Rows = Band<kStride>;
  __shared__ Products::Shared shared;
  __shared__ LogSum of_halves[2][Products::kRows];  // of 32 columns of each run
  if (*launch.fits == 0) return;
  const BlockScoresArguments& a = launch.a;
  const int first_tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kStride;
  const Rows band(a, blockIdx.y, first_tile);
  const float factor = a.scale / kStride;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int end = band.most_visible();

  LogSum sums[2][2] = {{LogSum::nothing(), LogSum::nothing()}, {LogSum::nothing(), LogSum::nothing()}};  // of this thread's rows
  for (int first_key = 0; first_key < end; first_key += Products::kColumns) {
    const Products products = band.template products<Q, K>(shared, first_key);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Products::row_of(m, half);
        float logits[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const bool seen = band.sees(row, first_key + Products::column_of(i / 2, i % 2));
          logits[i] = seen ? products.sums[m][i / 2][2 * half + i % 2] * factor : -INFINITY;
        }
        sums[m][half] = merged(sums[m][half], sum_of<0>(logits));
      }
    }
  }
  for (int m = 0; m < 2; ++m) {
    for (int half = 0; half < 2; ++half) {
      const LogSum sum = merged_across<1 | 2>(sums[m][half]);
      if (lane % 4 == 0) of_halves[warp % 2][Products::row_of(m, half)] = sum;
    }
  }
  __syncthreads();
  float denominators[2][2];
  for (int m = 0; m < 2; ++m) {
    for (int half = 0; half < 2; ++half) {
      const int row = Products::row_of(m, half);
      denominators[m][half] = merged(of_halves[0][row], of_halves[1][row]).logarithm();
    }
  }

  for (int first_key = 0; first_key < end; first_key += Products::kColumns) {
    const Products products = band.template products<Q, K>(shared, first_key);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // With stride 8 a warp's 16 rows are a tile and its 8 columns a block; with stride 16 half as many are.
        constexpr int kParts = kStride / 8;
        float shares[kParts][4 / kParts];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool seen = band.sees(Products::row_of(m, i / 2), first_key + Products::column_of(n, i % 2));
          shares[i / (4 / kParts)][i % (4 / kParts)] =
              seen ? products.sums[m][n][i] * factor - denominators[m][i / 2] : -INFINITY;
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const LogSum sum = sum_of<(kParts == 1 ? 2 : 0) | 1 | 4 | 8 | 16>(shares[part]);
          const int row = Products::row_of(m, part) - lane / 4;
          const int tile = row / Rows::kRowsOfTile;
          const int block = (first_key + Products::column_of(n, 0)) / Rows::kKeysOfBlock;
          const int rows = min(Rows::kRowsOfTile, band.strided_rows() - row);
          const bool writes = lane == 0 || (kStride == 16 && lane == 2);
          if (writes && rows > 0 && block < a.blocks) {
            band.first.scores[int64_t{tile} * a.blocks + block] = sum.logarithm() - logf(static_cast<float>(rows));
          }
        }
      }
    }
  }
  const int scored = (end + Products::kColumns - 1) / Products::kColumns * Products::kColumns / Rows::kKeysOfBlock;
  for (int tile = 0; tile < kStride && first_tile + tile < a.tiles; ++tile) {
    for (int block = scored + static_cast<int>(threadIdx.x); block < a.blocks; block += kThreads) {
      band.first.scores[int64_t{tile} * a.blocks + block] = -INFINITY;
    }
  }
}

}  // namespace

Status antidiagonal_block_scores_cuda(const AntidiagonalBlockScoresArguments& given, ExecutionContext& context) {
  Launch launch{given, nullptr};
  BlockScoresMemory memory;
  const Status status = prepare_block_scores_cuda(launch.a, 0, context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  const dim3 bands(static_cast<unsigned>((given.tiles + given.stride - 1) / given.stride), static_cast<unsigned>(given.query_heads));
  with_cuda_float_type(given.query_dtype, [&](auto query) {
    with_cuda_float_type(given.cache_dtype, [&](auto key) {
      using Q = decltype(query);
      using K = decltype(key);
      const auto kernel = given.stride == 8 ? score_bands<Q, K, 8> : score_bands<Q, K, 16>;
      kernel<<<bands, kThreads, 0, stream_of(context)>>>(launch);
    });
  });
  return launch_status();
}

}  // namespace kv
