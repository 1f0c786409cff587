// Lists of key blocks on a CUDA device, in three steps: maxima of runs, thresholds of budgets, lists.
#define KV_ISA cuda
#include "kernels/select-key-blocks/select-key-blocks-score.h"
#include "runtime/device.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

using cuda::BlockMaxima;
using cuda::kOrderBins;
using cuda::kOrderBits;
using cuda::TileBlocks;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kScoresOfBlock = 64 * kThreads;  // scores that a thread block counts; few enough to keep the device busy

struct Memory {
  float* maxima;   // [query_head, maxima of lags, blocks and rows]
  int64_t of_head;
  uint32_t* bins;    // [kOrderBins]: scores of all heads, by some of their bits
  uint32_t* order;   // the leading bits of the threshold that are known so far
  int64_t* rank;     // the threshold's rank among the scores that share these bits, largest first
  float* threshold;

  __host__ __device__ BlockMaxima of(const TileBlocks& tiles, int64_t head) const {
    float* first = maxima + head * of_head;
    return {first, first + tiles.lag_runs(), first + tiles.lag_runs() + tiles.blocks()};
  }
};

struct Launch {
  SelectKeyBlocksArguments a;
  Memory memory;
};

// One warp finds the maximum of each run of 64 values.
__global__ void __launch_bounds__(kThreads) find_maxima(const __grid_constant__ Launch launch) {
  const SelectKeyBlocksArguments& a = launch.a;
  const TileBlocks tiles{a};
  const int64_t head = blockIdx.y;
  const int64_t run = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (run >= launch.memory.of_head) return;
  const int64_t block = run - tiles.lag_runs();
  const int64_t row_run = block - tiles.blocks();
  const bool lags = block < 0;
  const bool rows = row_run >= 0;
  const float* values = lags ? a.slash + head * a.tokens : rows ? a.horizontal + head * a.rows : a.vertical + head * a.tokens;
  const int64_t first = lags ? tiles.first_lag(static_cast<int32_t>(run)) : kSelectedBlockTokens * (rows ? row_run : block);
  const int64_t length = rows ? a.rows : a.tokens;
  float most = -INFINITY;
  for (int64_t i = first + threadIdx.x % kWarp; i < first + kSelectedBlockTokens; i += kWarp) {
    if (i >= 0 && i < length) most = cuda::larger(most, values[i]);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    most = cuda::larger(most, __shfl_xor_sync(0xffffffffu, most, distance));
  }
  if (threadIdx.x % kWarp == 0) launch.memory.maxima[head * launch.memory.of_head + run] = most;
}

__global__ void __launch_bounds__(kThreads) start_rank(const __grid_constant__ Launch launch, int64_t rank) {
  for (int bin = static_cast<int>(threadIdx.x); bin < kOrderBins; bin += kThreads) launch.memory.bins[bin] = 0;
  if (threadIdx.x != 0) return;
  *launch.memory.order = 0;
  *launch.memory.rank = rank;
}

// Counts scores by `bits` bits from `shift` on. Only scores whose higher bits are the threshold's count. A thread
// block has some tiles.
__global__ void __launch_bounds__(kThreads) count_scores(const __grid_constant__ Launch launch, int shift, int bits) {
  __shared__ uint32_t bins[kOrderBins];
  const TileBlocks tiles{launch.a};
  const int64_t head = blockIdx.y;
  const BlockMaxima maxima = launch.memory.of(tiles, head);
  for (int bin = static_cast<int>(threadIdx.x); bin < kOrderBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
  const uint32_t known = *launch.memory.order;
  const int above = shift + bits;
  for (int tile = static_cast<int>(blockIdx.x); tile < launch.a.tiles(); tile += static_cast<int>(gridDim.x)) {
    for (int block = static_cast<int>(threadIdx.x); block < tiles.seen(tile); block += kThreads) {
      const uint32_t order = cuda::order_of(__float_as_uint(tiles.score(maxima, tile, block)));
      if (above == 32 || order >> above == known >> above) atomicAdd(&bins[order >> shift & ((1u << bits) - 1)], 1);
    }
  }
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < kOrderBins; bin += kThreads) {
    if (bins[bin] != 0) atomicAdd(&launch.memory.bins[bin], bins[bin]);
  }
}

// Finds the bin of the wanted score, from the highest bin down.
__global__ void __launch_bounds__(kWarp) find_bin(const __grid_constant__ Launch launch, int shift, int bits) {
  uint32_t* bins = launch.memory.bins;
  int64_t rank = *launch.memory.rank;
  const int lane = static_cast<int>(threadIdx.x);
  for (int top = (1 << bits) - 1; top >= 0; top -= kWarp) {
    const uint32_t own = top - lane >= 0 ? bins[top - lane] : 0;
    int64_t counted = own;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(0xffffffffu, counted, distance);
      if (lane >= distance) counted += earlier;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, counted >= rank);
    if (reached != 0) {
      const int found = __ffs(static_cast<int>(reached)) - 1;
      if (lane == found) {
        const uint32_t order = *launch.memory.order | static_cast<uint32_t>(top - lane) << shift;
        *launch.memory.order = order;
        *launch.memory.rank = rank - (counted - own);
        *launch.memory.threshold = __uint_as_float(cuda::bits_of_order(order));
      }
      break;
    }
    rank -= __shfl_sync(0xffffffffu, counted, kWarp - 1);
  }
  __syncwarp();
  for (int bin = lane; bin < kOrderBins; bin += kWarp) bins[bin] = 0;
}

// One warp writes each list.
__global__ void __launch_bounds__(kThreads) write_lists(const __grid_constant__ Launch launch) {
  const SelectKeyBlocksArguments& a = launch.a;
  const TileBlocks tiles{a};
  const int64_t head = blockIdx.y;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (tile >= a.tiles()) return;
  const BlockMaxima maxima = launch.memory.of(tiles, head);
  const float threshold = a.by_budget ? *launch.memory.threshold : a.threshold;
  const int64_t list = head * a.tiles() + tile;
  int32_t* to = a.key_blocks + list * a.capacity;
  int taken = 0;
  for (int first = 0; first < tiles.seen(tile); first += kWarp) {
    const int block = first + lane;
    const bool takes = block < tiles.seen(tile) && !(tiles.score(maxima, tile, block) < threshold);
    const unsigned all = __ballot_sync(0xffffffffu, takes);
    if (takes) to[taken + __popc(all & ((1u << lane) - 1))] = block;
    taken += __popc(all);
  }
  if (lane == 0) a.counts[list] = taken;
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Status select_key_blocks_cuda(const SelectKeyBlocksArguments& a, ExecutionContext& context) {
  const TileBlocks tiles{a};
  Launch launch{a, {}};
  Memory& memory = launch.memory;
  memory.of_head = int64_t{tiles.lag_runs()} + tiles.blocks() + tiles.row_runs();
  const size_t heads = static_cast<size_t>(a.query_heads);
  const size_t maxima_bytes = rounded_up(heads * static_cast<size_t>(memory.of_head) * sizeof(float));
  const size_t bins_bytes = kOrderBins * sizeof(uint32_t);
  auto* bytes = static_cast<char*>(context.queue->workspace(maxima_bytes + bins_bytes + sizeof(int64_t) + 2 * sizeof(float)));
  if (bytes == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for the maxima of blocks");
  memory.maxima = reinterpret_cast<float*>(bytes);
  memory.bins = reinterpret_cast<uint32_t*>(bytes + maxima_bytes);
  memory.rank = reinterpret_cast<int64_t*>(bytes + maxima_bytes + bins_bytes);
  memory.order = reinterpret_cast<uint32_t*>(memory.rank + 1);
  memory.threshold = reinterpret_cast<float*>(memory.order + 1);

  cudaStream_t stream = stream_of(context);
  const unsigned query_heads = static_cast<unsigned>(a.query_heads);
  find_maxima<<<dim3(static_cast<unsigned>((memory.of_head + kWarps - 1) / kWarps), query_heads), kThreads, 0, stream>>>(launch);
  if (a.by_budget) {
    start_rank<<<1, kThreads, 0, stream>>>(launch, tiles.budgeted());
    const dim3 counting(static_cast<unsigned>((tiles.seen_by_all() + kScoresOfBlock - 1) / kScoresOfBlock), query_heads);
    for (int shift = 32; shift > 0;) {
      const int bits = shift < kOrderBits ? shift : kOrderBits;
      shift -= bits;
      count_scores<<<counting, kThreads, 0, stream>>>(launch, shift, bits);
      find_bin<<<1, kWarp, 0, stream>>>(launch, shift, bits);
    }
  }
  const unsigned lists = static_cast<unsigned>((a.tiles() + kWarps - 1) / kWarps);
  write_lists<<<dim3(lists, query_heads), kThreads, 0, stream>>>(launch);
  return launch_status();
}

}  // namespace kv
