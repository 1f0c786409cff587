// Antidiagonal block scores on a CUDA device. A thread block takes bands of strided rows of one query head, and multiplies
// them with all strided keys once.
#include "kernels/antidiagonal-block-scores/antidiagonal-block-scores.h"

#include "shared/prefill-block-scores/resident-blocks.cuda.h"
#include "shared/prefill-block-scores/row-logits.cuda.h"

namespace kv {
namespace {

using namespace prefill_block_scores;

// As large a tile as registers have room for: what is read of L2 takes as long as the products.
template <class E>
using Tile = TileProducts<E, 4>;

__device__ float stored(const void* elements, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f16:
      return to_float(static_cast<const __half*>(elements)[index]);
    case DType::bf16:
      return to_float(static_cast<const __nv_bfloat16*>(elements)[index]);
    default:
      return static_cast<const float*>(elements)[index];
  }
}

struct Launch {
  AntidiagonalBlockScoresArguments a;
  const int32_t* fits;
  float* logits;  // [thread block, block, row]
  int blocks;     // that fill runs of columns
  bool copies;    // whether pieces of 16 bytes can be copied, and a strided key lies in one block of the cache
  SliceRoom slices;

  __host__ __device__ int tiles_of_band() const { return Tile<float>::kRows * a.stride / kScoredTileRows; }
  __host__ __device__ int bands() const { return (a.tiles + tiles_of_band() - 1) / tiles_of_band(); }
  __host__ __device__ int items() const { return bands() * a.query_heads; }
};

// The strided rows of a thread block. A strided row is its rows one after another, the last one first.
template <class E, int kStride>
struct Band {
  using Products = Tile<E>;
  static constexpr int kKeysOfBlock = kScoredBlockKeys / kStride;
  static constexpr int kBlocksOfRun = Products::kColumns / kKeysOfBlock;
  static constexpr int kTogether = Products::kThreads / kPieces;  // rows that are loaded at a time

  const Launch& launch;
  int tile;
  ScoredTile first;  // the first tile
  int rows;          // of the entry, from the band's first on
  int piece = static_cast<int>(threadIdx.x) % kPieces;
  int own = static_cast<int>(threadIdx.x) / kPieces;

  __device__ Band(const Launch& given, int item)
      : launch(given),
        // The last bands see the most, so they come first. Heads that read the same keys come together.
        tile((given.bands() - 1 - item / given.a.query_heads) * given.tiles_of_band()),
        first(given.a, item % given.a.query_heads, tile),
        rows(first.tokens - first.position) {}

  __device__ int strided_rows() const { return min(Products::kRows, (rows + kStride - 1) / kStride); }
  // How many strided keys the strided row sees.
  __device__ int visible(int row) const { return row < strided_rows() ? (first.position + row * kStride) / kStride + 1 : 0; }
  __device__ int most_visible() const { return visible(strided_rows() - 1); }
  __device__ int runs() const { return (most_visible() + Products::kColumns - 1) / Products::kColumns; }

  // All strided keys of a block come to one thread of the products. 32 columns are 32 keys.
  __device__ static int key_of_column(int column) {
    const int n = column % 32 / 8;
    const int key = 2 * n + column % 2;
    const int block = column % 8 / 2 * (8 / kKeysOfBlock) + key / kKeysOfBlock;
    return column / 32 * 32 + block * kKeysOfBlock + key % kKeysOfBlock;
  }

  __device__ void load_rows(char* to, int slice) const {
    const PrefillBlockScoresArguments& a = launch.a;
    const int begin = slice * kSliceElements<E> + piece * kPieceElements<E>;
      const auto offset = [&](int row) { return query_offset(a, first.first_row + row, first.query_head); };
    if (launch.copies) {
      const int i = begin / a.head_dim;
      const E* const queries = static_cast<const E*>(a.query) + (begin - i * a.head_dim);
#pragma unroll
      for (int row = own; row < Products::kRows; row += kTogether) {
        const int query = row * kStride + kStride - 1 - i;
        const bool real = i < kStride && query < rows;
        ptx::async_copy_16(piece_at(to, row, piece), queries + (real ? offset(query) : 0), real);
      }
      return;
    }
    for (int row = own; row < Products::kRows; row += kTogether) {
      store_piece<E>(piece_at(to, row, piece), [&](int e) {
        const int i = (begin + e) / a.head_dim;
        const int query = row * kStride + kStride - 1 - i;
        if (i >= kStride || query >= rows) return 0.0f;
        return stored(a.query, a.query_dtype, offset(query) + begin + e - i * a.head_dim);
      });
    }
  }

  // `offsets` are of the strided keys of the run that is being loaded. Eight lanes have some columns to themselves.
  __device__ void load_columns(int64_t (&offsets)[Products::kColumns], char* to, int run, int slice) const {
    const PrefillBlockScoresArguments& a = launch.a;
    const int begin = slice * kSliceElements<E> + piece * kPieceElements<E>;
    const auto first_key = [&](int column) { return (run * Products::kColumns + key_of_column(column)) * kStride; };
    if (launch.copies) {
      if (slice == 0) {
        for (int column = own + piece * kTogether; column < Products::kColumns; column += kPieces * kTogether) {
          const int key = first_key(column);
          offsets[column] = key < first.tokens ? key_offset(a, first.blocks, key) : 0;
        }
        __syncwarp();
      }
      const int i = begin / a.head_dim;
      const E* const keys = static_cast<const E*>(a.keys) + i * a.token_stride + (begin - i * a.head_dim);
#pragma unroll
      for (int column = own; column < Products::kColumns; column += kTogether) {
        const bool real = i < kStride && first_key(column) + i < first.tokens;
        ptx::async_copy_16(piece_at(to, column, piece), real ? keys + offsets[column] : a.keys, real);
      }
      return;
    }
    for (int column = own; column < Products::kColumns; column += kTogether) {
      store_piece<E>(piece_at(to, column, piece), [&](int e) {
        const int i = (begin + e) / a.head_dim;
        const int key = first_key(column) + i;
        if (i >= kStride || key >= first.tokens) return 0.0f;
        return stored(a.keys, a.cache_dtype, key_offset(a, first.blocks, key) + begin + e - i * a.head_dim);
      });
    }
  }
};

template <class E, int kStride>
__global__ void __launch_bounds__(Tile<E>::kThreads, 1) score_bands(const __grid_constant__ Launch launch) {
  using Products = Tile<E>;
  using Rows = Band<E, kStride>;
  constexpr int kKeys = Rows::kKeysOfBlock;
  extern __shared__ __align__(1024) char shared[];
  __shared__ int64_t offsets[Products::kColumns];
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const float factor = a.scale / kStride * kLog2E;
  const Slices<Products> slices{shared, launch.slices};
  float* const room = launch.logits + int64_t{blockIdx.x} * launch.blocks * Products::kRows;
  for (int item = static_cast<int>(blockIdx.x); item < launch.items(); item += static_cast<int>(gridDim.x)) {
    const Rows band(launch, item);
    RowLogits<Products, kScoredTileRows / kStride> logits(room);
    const int visible_to_all = band.visible(0);
    const bool is_last = band.strided_rows() < Products::kRows;
    slices.for_each_run(
        band.runs(), [&](char* to, int slice) { band.load_rows(to, slice); },
        [&](char* to, int run, int slice) { band.load_columns(offsets, to, run, slice); },
        [&](Products& products, int) { products.begin([](int, int) { return 0.0f; }); },
        [&](const Products& products, int run) {
          const bool hides = is_last || (run + 1) * Products::kColumns > visible_to_all;
#pragma unroll
          for (int part = 0; part < 32 / kKeys; ++part) {
            const int group = part / (8 / kKeys);  // of 32 columns
            const int block = run * Rows::kBlocksOfRun + group * (32 / kKeys) + Products::pair() * (8 / kKeys) + part % (8 / kKeys);
            float sums[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int visible = hides ? band.visible(Products::row_of(half)) : 0;
              float of_keys[kKeys];
#pragma unroll
              for (int key = 0; key < kKeys; ++key) {
                of_keys[key] = products.sum(half, (part * kKeys + key) / 2, key % 2) * factor;
                if (hides && block * kKeys + key >= visible) of_keys[key] = -INFINITY;
              }
              sums[half] = sum_of<0>(of_keys).base_2();
            }
            logits.add(block, sums);
          }
        });
    __syncthreads();
    logits.write_scores(reinterpret_cast<float*>(shared), a, band.first.scores, a.tiles - band.tile, band.strided_rows(),
                        (band.most_visible() + kKeys - 1) / kKeys);
    __syncthreads();
  }
}

template <class E>
Status estimate(const AntidiagonalBlockScoresArguments& given, ExecutionContext& context) {
  using Products = Tile<E>;
  const int64_t counts[] = {given.head_dim,     given.query_token_stride, given.query_head_stride,
                            given.token_stride, given.block_stride};
  const auto aligned = [](const void* elements) { return reinterpret_cast<uintptr_t>(elements) % kPieceBytes == 0; };
  const auto kernel = given.stride == 8 ? score_bands<E, 8> : score_bands<E, 16>;
  Launch launch{given, nullptr, nullptr, 0, false, {}};
  launch.copies = given.query_dtype == given.cache_dtype && given.block_tokens % given.stride == 0 &&
                  aligned(given.query) && aligned(given.keys) &&
                  std::all_of(std::begin(counts), std::end(counts), [](int64_t n) { return n % kPieceElements<E> == 0; });
  const int blocks_of_run = Products::kColumns * given.stride / kScoredBlockKeys;
  launch.blocks = (given.blocks + blocks_of_run - 1) / blocks_of_run * blocks_of_run;
  launch.slices.count = (given.stride * given.head_dim + kSliceElements<E> - 1) / kSliceElements<E>;
  ResidentBlocks resident;
  Status status = resident.find<Slices<Products>>(kernel, launch.slices);
  if (!status.ok()) return status;
  const size_t of_block = static_cast<size_t>(launch.blocks) * Products::kRows * sizeof(float);
  const int grid = resident.of(launch.items(), of_block);
  BlockScoresMemory memory;
  status = prepare_block_scores_cuda(launch.a, static_cast<size_t>(grid) * of_block, context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  launch.logits = reinterpret_cast<float*>(memory.rest);
  kernel<<<grid, Products::kThreads, resident.shared_bytes, stream_of(context)>>>(launch);
  return launch_status();
}

}  // namespace

Status antidiagonal_block_scores_cuda(const AntidiagonalBlockScoresArguments& given, ExecutionContext& context) {
  if (given.query_dtype != given.cache_dtype) return estimate<float>(given, context);
  Status status = Status::success();
  with_cuda_float_type(given.query_dtype, [&](auto element) { status = estimate<decltype(element)>(given, context); });
  return status;
}

}  // namespace kv
