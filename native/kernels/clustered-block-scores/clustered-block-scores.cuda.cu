// Clustered block scores on a CUDA device, in two steps: clusters of keys, then scores. A thread block of the second step
// takes bands of 128 scored rows of one query head, which are two tiles, and multiplies them with all clusters once.
#include "kernels/clustered-block-scores/clustered-block-scores.h"

#include "kernels/clustered-block-scores/clustered-block-scores-keys.cuda.h"
#include "shared/prefill-block-scores/resident-blocks.cuda.h"
#include "shared/prefill-block-scores/row-logits.cuda.h"

namespace kv {
namespace {

using namespace prefill_block_scores;

template <class Q>
using Tile = TileProducts<Rounded<Q>, 2>;

struct Launch {
  PrefillBlockScoresArguments a;
  const int32_t* fits;
  Clusters clusters;
  float* logits;  // [thread block, block, row]
  SliceRoom slices;

  static constexpr int kTiles = Tile<float>::kRows / kScoredRowsOfTile;

  __host__ __device__ int bands() const { return (a.tiles + kTiles - 1) / kTiles; }
  // That fill runs.
  __host__ __device__ int blocks() const { return clusters.means.columns / kKeyClusters; }
  __host__ __device__ int items() const { return bands() * a.query_heads; }
};

// The scored rows of a thread block. Row r is row kScoredRowStep * r of the tiles.
template <class Q>
struct Band {
  using Products = Tile<Q>;

  const Launch& launch;
  int tile;
  ScoredTile first;  // the first tile
  int rows;          // scored ones that there are

  __device__ Band(const Launch& given, int item)
      : launch(given),
        // The last bands see the most, so they come first. Heads that read the same keys come together.
        tile((given.bands() - 1 - item / given.a.query_heads) * Launch::kTiles),
        first(given.a, item % given.a.query_heads, tile),
        rows(min(Products::kRows, (first.tokens - first.position + kScoredRowStep - 1) / kScoredRowStep)) {}

  __device__ int seen_by(int row) const { return row < rows ? first.seen_by(row * kScoredRowStep) : 0; }
  __device__ int runs() const { return (seen_by(rows - 1) + kBlocksOfRun - 1) / kBlocksOfRun; }

  __device__ void load_rows(char* to, int slice) const {
    load_queries<Q, Products>(to, slice, launch.a.head_dim, [this](int row) {
      return row < rows ? query_at<Q>(launch.a, first.first_row + row * kScoredRowStep, first.query_head) : nullptr;
    });
  }

  __device__ const float* logarithms(int run) const {
    return launch.clusters.logarithms + first.kv_head * launch.clusters.means.columns + int64_t{run} * Products::kColumns;
  }
};

template <class Q>
__global__ void __launch_bounds__(Tile<Q>::kThreads, 2) score_bands(const __grid_constant__ Launch launch) {
  using Products = Tile<Q>;
  constexpr int kColumns = Products::kColumns;
  extern __shared__ __align__(1024) char shared[];
  // More than the runs of all stages, so that none is written while it is read.
  constexpr int kRuns = Slices<Products>::kMostStages + 1;
  __shared__ __align__(16) float logarithms[kRuns][kColumns];
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const Slices<Products> slices{shared, launch.slices};
  float* const room = launch.logits + int64_t{blockIdx.x} * launch.blocks() * Products::kRows;
  for (int item = static_cast<int>(blockIdx.x); item < launch.items(); item += static_cast<int>(gridDim.x)) {
    const Band<Q> band(launch, item);
    RowLogits<Products, kScoredRowsOfTile> logits(room);
    const int seen_by_all = band.seen_by(0);
    slices.for_each_run(
        band.runs(), [&](char* to, int slice) { band.load_rows(to, slice); },
        [&](char* to, int run, int slice) {
          launch.clusters.means.load<Products>(to, band.first.kv_head, run, slice);
          constexpr int kOfPiece = kPieceElements<float>;
          const int first = static_cast<int>(threadIdx.x) * kOfPiece;
          if (slice != 0 || first >= kColumns) return;
          ptx::async_copy_16(logarithms[run % kRuns] + first, band.logarithms(run) + first, true);
        },
        [&](Products& products, int run) {
          products.begin([&](int n, int odd) { return logarithms[run % kRuns][Products::column_of(n, odd)]; });
        },
        [&](const Products& products, int run) {
          const bool hides = band.rows < Products::kRows || (run + 1) * kBlocksOfRun > seen_by_all;
#pragma unroll
          for (int four = 0; four < kBlocksOfRun / 4; ++four) {
            const int block = run * kBlocksOfRun + four * 4 + Products::pair();
            float best[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              best[half] = products.sum(half, four * 4, 0);
#pragma unroll
              for (int cluster = 1; cluster < kKeyClusters; ++cluster) {
                best[half] = ptx::larger_or_nan(best[half], products.sum(half, four * 4 + cluster / 2, cluster % 2));
              }
              if (hides && block >= band.seen_by(Products::row_of(half))) best[half] = -INFINITY;
            }
            logits.add(block, best);
          }
        });
    __syncthreads();
    logits.write_scores(reinterpret_cast<float*>(shared), a, band.first.scores, a.tiles - band.tile, band.rows,
                        band.seen_by(band.rows - 1));
    __syncthreads();
  }
}

template <class Q, class K>
Status estimate(const PrefillBlockScoresArguments& given, ExecutionContext& context) {
  using E = Rounded<Q>;
  using Products = Tile<Q>;
  Launch launch{given, nullptr, {MeanKeys::of<E>(given, given.blocks * kKeyClusters), nullptr}, nullptr, {}};
  MeanKeys& means = launch.clusters.means;
  ResidentBlocks resident;
  launch.slices.count = means.depth / kSliceElements<E>;
  Status status = resident.find<Slices<Products>>(score_bands<Q>, launch.slices);
  if (!status.ok()) return status;
  const size_t of_block = static_cast<size_t>(launch.blocks()) * Products::kRows * sizeof(float);
  const int grid = resident.of(launch.items(), of_block);
  const size_t logits = static_cast<size_t>(grid) * of_block;
  const size_t logarithms = static_cast<size_t>(given.kv_heads) * static_cast<size_t>(means.columns) * sizeof(float);
  BlockScoresMemory memory;
  status = prepare_block_scores_cuda(launch.a, logits + logarithms + means.bytes<E>(given), context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  launch.logits = reinterpret_cast<float*>(memory.rest);
  launch.clusters.logarithms = reinterpret_cast<float*>(memory.rest + logits);
  means.memory = memory.rest + logits + logarithms;
  const int cluster_bytes = BlockKeys<K>::bytes(given.head_dim);
  status = allow_shared_bytes(cluster_keys<K, E>, cluster_bytes);
  if (!status.ok()) return status;
  cudaStream_t stream = stream_of(context);
  const dim3 blocks(static_cast<unsigned>(launch.blocks()), static_cast<unsigned>(given.kv_heads));
  cluster_keys<K, E><<<blocks, kClusterThreads, cluster_bytes, stream>>>(launch.a, launch.clusters, launch.fits);
  score_bands<Q><<<grid, Products::kThreads, resident.shared_bytes, stream>>>(launch);
  return launch_status();
}

}  // namespace

Status clustered_block_scores_cuda(const ClusteredBlockScoresArguments& given, ExecutionContext& context) {
  Status status = Status::success();
  with_cuda_float_type(given.query_dtype, [&](auto query) {
    with_cuda_float_type(given.cache_dtype, [&](auto key) { status = estimate<decltype(query), decltype(key)>(given, context); });
  });
  return status;
}

}  // namespace kv
