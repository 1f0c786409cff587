// Lists of key blocks on a CUDA device, in three steps: maxima of runs, the threshold of a budget, lists.
#define KV_ISA cuda
#include "kernels/select-key-blocks/select-key-blocks-score.h"
#include "runtime/device.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

using cuda::Cut;
using cuda::HeadEstimate;
using cuda::kAllTies;
using cuda::kOrderBins;
using cuda::kOrderBits;
using cuda::ScoredTile;
using cuda::TileBlocks;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kScoresOfBlock = 64 * kThreads;  // scores that a thread block counts; few enough to keep the device busy

// What is found of the threshold of a budget.
struct Found {
  uint32_t order;   // its leading bits
  float threshold;
  int64_t wanted;   // its rank among the scores that share these bits, largest first
  int64_t equal;    // how many scores share them

  __device__ bool takes_all_ties() const { return wanted == equal || threshold == INFINITY; }
};

struct Memory {
  float* maxima;  // of each query head: those of lags, blocks and rows
  uint32_t* bins;  // [kOrderBins]: scores of all heads, by some of their bits
  Found* found;
  int32_t* ties;  // [query_head, tile]: how many scores of a list equal the threshold, then how many of those are taken
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
  if (run >= tiles.maxima()) return;
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
  if (threadIdx.x % kWarp == 0) launch.memory.maxima[head * tiles.maxima() + run] = most;
}

__global__ void __launch_bounds__(kThreads) start_rank(const __grid_constant__ Launch launch, int64_t rank) {
  for (int bin = static_cast<int>(threadIdx.x); bin < kOrderBins; bin += kThreads) launch.memory.bins[bin] = 0;
  if (threadIdx.x != 0) return;
  *launch.memory.found = {0, 0, rank, 0};
}

// Counts scores by `bits` bits from `shift` on. Only scores whose higher bits are the threshold's count. A thread
// block has some tiles.
__global__ void __launch_bounds__(kThreads) count_scores(const __grid_constant__ Launch launch, int shift, int bits) {
  __shared__ uint32_t bins[kOrderBins];
  const TileBlocks tiles{launch.a};
  const int64_t head = blockIdx.y;
  const HeadEstimate estimate = tiles.estimate_of(head, launch.memory.maxima);
  for (int bin = static_cast<int>(threadIdx.x); bin < kOrderBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
  const uint32_t known = launch.memory.found->order;
  const int above = shift + bits;
  for (int tile = static_cast<int>(blockIdx.x); tile < launch.a.tiles(); tile += static_cast<int>(gridDim.x)) {
    const ScoredTile scored = tiles.scored(estimate, tile);
    for (int block = static_cast<int>(threadIdx.x); block < scored.seen; block += kThreads) {
      const uint32_t order = cuda::order_of(__float_as_uint(scored.score(block)));
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
  const Found found = *launch.memory.found;
  int64_t wanted = found.wanted;
  const int lane = static_cast<int>(threadIdx.x);
  for (int top = (1 << bits) - 1; top >= 0; top -= kWarp) {
    const uint32_t own = top - lane >= 0 ? bins[top - lane] : 0;
    int64_t counted = own;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(0xffffffffu, counted, distance);
      if (lane >= distance) counted += earlier;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, counted >= wanted);
    if (reached != 0) {
      if (lane == __ffs(static_cast<int>(reached)) - 1) {
        const uint32_t order = found.order | static_cast<uint32_t>(top - lane) << shift;
        *launch.memory.found = {order, __uint_as_float(cuda::bits_of_order(order)), wanted - (counted - own), own};
      }
      break;
    }
    wanted -= __shfl_sync(0xffffffffu, counted, kWarp - 1);
  }
  __syncwarp();
  for (int bin = lane; bin < kOrderBins; bin += kWarp) bins[bin] = 0;
}

// One warp counts how many scores of a list equal the threshold, if some of these are left out.
__global__ void __launch_bounds__(kThreads) count_ties(const __grid_constant__ Launch launch) {
  const Found& found = *launch.memory.found;
  if (found.takes_all_ties()) return;
  const TileBlocks tiles{launch.a};
  const int64_t head = blockIdx.y;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (tile >= launch.a.tiles()) return;
  const ScoredTile scored = tiles.scored(tiles.estimate_of(head, launch.memory.maxima), tile);
  int ties = 0;
  for (int block = lane; block < scored.seen; block += kWarp) ties += scored.score(block) == found.threshold ? 1 : 0;
  ties = __reduce_add_sync(0xffffffffu, ties);
  if (lane == 0) launch.memory.ties[head * launch.a.tiles() + tile] = ties;
}

// One thread block gives the ties that are taken to the first lists.
__global__ void __launch_bounds__(kThreads) share_ties(const __grid_constant__ Launch launch) {
  const Found& found = *launch.memory.found;
  if (found.takes_all_ties()) return;
  __shared__ int64_t of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t left = found.wanted;
  for (int64_t first = 0; first < launch.a.lists(); first += kThreads) {
    const int64_t list = first + threadIdx.x;
    const int32_t own = list < launch.a.lists() ? launch.memory.ties[list] : 0;
    int64_t counted = own;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(0xffffffffu, counted, distance);
      if (static_cast<int>(threadIdx.x) % kWarp >= distance) counted += earlier;
    }
    if (threadIdx.x % kWarp == kWarp - 1) of_warp[warp] = counted;
    __syncthreads();
    int64_t all = 0;
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) counted += of_warp[other];
      all += of_warp[other];
    }
    __syncthreads();
    const int64_t rest = left - (counted - own);
    if (list < launch.a.lists()) launch.memory.ties[list] = rest <= 0 ? 0 : rest < own ? static_cast<int32_t>(rest) : own;
    left -= all;
  }
}

constexpr int kMassBits = 8;
constexpr int kMassBins = 1 << kMassBits;

// From where on a tile takes blocks by its own scores, found by one warp. Masses are summed by some bits of their scores,
// then, where the wanted mass is reached, by the next bits. `bins` has kMassBins.
__device__ Cut cut_of_tile(const TileBlocks& tiles, const ScoredTile& tile, uint32_t* bins) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto order = [&](int block) { return cuda::order_of(__float_as_uint(tile.known_score(block))); };
  uint32_t best_order = 0;
  for (int block = lane; block < tile.seen; block += kWarp) best_order = max(best_order, order(block));
  best_order = __reduce_max_sync(kAll, best_order);
  const float best = __uint_as_float(cuda::bits_of_order(best_order));
  if (tiles.a.rule == BlockRule::of_max) return {best + tiles.a.threshold, kAllTies};

  const auto mass = [&](int block) { return cuda::mass_of(best - tile.known_score(block)); };
  uint64_t total = 0;
  for (int block = lane; block < tile.seen; block += kWarp) total += mass(block);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) total += __shfl_xor_sync(kAll, total, distance);
  if (total == 0) return {-INFINITY, kAllTies};
  const int shift = cuda::mass_shift(total);

  // The bits of the cut above `base` that are to be found: no block below has any mass.
  uint32_t base = cuda::order_of(__float_as_uint(best - cuda::kNoMassBelow));
  int bits = max(1, 32 - __clz(static_cast<int>(best_order - base)));
  int64_t wanted = -1;
  while (bits > 0) {
    const int low = bits > kMassBits ? bits - kMassBits : 0;
    for (int bin = lane; bin < kMassBins; bin += kWarp) bins[bin] = 0;
    __syncwarp();
    uint32_t always = 0;
    for (int block = lane; block < tile.seen; block += kWarp) {
      const uint32_t above = order(block) - base;
      if (order(block) < base || uint64_t{above} >> bits != 0) continue;
      const auto of_block = static_cast<uint32_t>(mass(block) >> shift);
      if (tile.always_takes(block)) always += of_block;
      else atomicAdd(&bins[above >> low], of_block);
    }
    __syncwarp();
    constexpr int kOwn = kMassBins / kWarp;  // bins of a lane, the highest ones of the first lane
    uint32_t own = 0;
    for (int i = 0; i < kOwn; ++i) own += bins[kMassBins - 1 - lane * kOwn - i];
    uint32_t sum = own;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t earlier = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += earlier;
    }
    if (wanted < 0) {
      const int64_t of_always = __reduce_add_sync(kAll, always);
      wanted = tiles.share_of(of_always + __shfl_sync(kAll, sum, kWarp - 1)) - of_always;
      if (wanted <= 0) return {INFINITY, kAllTies};
    }
    const int found = __ffs(static_cast<int>(__ballot_sync(kAll, sum >= wanted))) - 1;
    int bin = kMassBins - 1 - lane * kOwn;
    int64_t rest = wanted - (sum - own);
    while (lane == found && bins[bin] < rest) rest -= bins[bin--];
    wanted = __shfl_sync(kAll, rest, found);
    base += static_cast<uint32_t>(__shfl_sync(kAll, bin, found)) << low;
    bits = low;
    __syncwarp();
  }
  const float score = __uint_as_float(cuda::bits_of_order(base));
  const auto of_tie = static_cast<int64_t>(cuda::mass_of(best - score) >> shift);
  return {score, (wanted + of_tie - 1) / of_tie};
}

// One warp writes each list.
__global__ void __launch_bounds__(kThreads) write_lists(const __grid_constant__ Launch launch) {
  __shared__ uint32_t bins[kWarps][kMassBins];
  const SelectKeyBlocksArguments& a = launch.a;
  const TileBlocks tiles{a};
  const int64_t head = blockIdx.y;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + warp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (tile >= a.tiles()) return;
  const ScoredTile scored = tiles.scored(tiles.estimate_of(head, launch.memory.maxima), tile);
  const int64_t list = head * a.tiles() + tile;
  Cut cut{a.threshold, kAllTies};
  if (a.rule == BlockRule::budget) {
    const Found& found = *launch.memory.found;
    cut = {found.threshold, found.takes_all_ties() ? kAllTies : launch.memory.ties[list]};
  } else if (a.rule != BlockRule::threshold) {
    cut = cut_of_tile(tiles, scored, bins[warp]);
  }
  int32_t* to = a.key_blocks + list * a.capacity;
  const unsigned earlier = (1u << lane) - 1;
  int taken = 0;
  int ties = 0;
  for (int first = 0; first < scored.seen; first += kWarp) {
    const int block = first + lane;
    const float score = block < scored.seen ? scored.score(block) : -INFINITY;
    const unsigned equal = __ballot_sync(0xffffffffu, block < scored.seen && score == cut.score);
    const bool takes = score > cut.score || ((equal >> lane & 1) != 0 && ties + __popc(equal & earlier) < cut.ties);
    const unsigned all = __ballot_sync(0xffffffffu, takes);
    if (takes) to[taken + __popc(all & earlier)] = block;
    taken += __popc(all);
    ties += __popc(equal);
  }
  if (lane == 0) a.counts[list] = taken;
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Status select_key_blocks_cuda(const SelectKeyBlocksArguments& a, ExecutionContext& context) {
  const TileBlocks tiles{a};
  Launch launch{a, {}};
  Memory& memory = launch.memory;
  const size_t maxima_bytes = rounded_up(static_cast<size_t>(a.query_heads * tiles.maxima()) * sizeof(float));
  const size_t bins_bytes = kOrderBins * sizeof(uint32_t);
  const size_t ties_bytes = static_cast<size_t>(a.lists()) * sizeof(int32_t);
  auto* bytes = static_cast<char*>(context.queue->workspace(maxima_bytes + bins_bytes + sizeof(Found) + ties_bytes));
  if (bytes == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for the maxima of blocks");
  memory.maxima = reinterpret_cast<float*>(bytes);
  memory.bins = reinterpret_cast<uint32_t*>(bytes + maxima_bytes);
  memory.found = reinterpret_cast<Found*>(bytes + maxima_bytes + bins_bytes);
  memory.ties = reinterpret_cast<int32_t*>(memory.found + 1);

  cudaStream_t stream = stream_of(context);
  const unsigned query_heads = static_cast<unsigned>(a.query_heads);
  const auto warps = [&](int64_t of_head) { return dim3(static_cast<unsigned>((of_head + kWarps - 1) / kWarps), query_heads); };
  if (a.slash != nullptr) find_maxima<<<warps(tiles.maxima()), kThreads, 0, stream>>>(launch);
  if (a.rule == BlockRule::budget) {
    start_rank<<<1, kThreads, 0, stream>>>(launch, tiles.budgeted());
    const dim3 counting(static_cast<unsigned>((tiles.seen_by_all() + kScoresOfBlock - 1) / kScoresOfBlock), query_heads);
    for (int shift = 32; shift > 0;) {
      const int bits = shift < kOrderBits ? shift : kOrderBits;
      shift -= bits;
      count_scores<<<counting, kThreads, 0, stream>>>(launch, shift, bits);
      find_bin<<<1, kWarp, 0, stream>>>(launch, shift, bits);
    }
    count_ties<<<warps(a.tiles()), kThreads, 0, stream>>>(launch);
    share_ties<<<1, kThreads, 0, stream>>>(launch);
  }
  write_lists<<<warps(a.tiles()), kThreads, 0, stream>>>(launch);
  return launch_status();
}

}  // namespace kv
