#include "kernels/block-sparse-attention/block-sparse-attention-plan.cuda.h"

#include <cub/block/block_scan.cuh>

#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = kThreads;  // each holds the lists of about one length
constexpr size_t kCountBytes = 256;

// The work tiles of one batch entry that read one kv head, numbered from the last rows to the first.
struct TilesOfHead {
  const BlockSparseAttentionArguments& a;
  int entry;
  int kv_head;
  int first_row, rows, slot, key_count;
  int first_tile = 0;  // the entry's first query tile
  int query_tiles;
  int group;

  __device__ TilesOfHead(const BlockSparseAttentionArguments& arguments, int entry, int kv_head)
      : a(arguments), entry(entry), kv_head(kv_head), group(arguments.query_heads / arguments.kv_heads) {
    for (int before = 0; before < entry; ++before) {
      first_tile += query_tiles_of(a.query_start[before + 1] - a.query_start[before]);
    }
    first_row = a.query_start[entry];
    rows = a.query_start[entry + 1] - first_row;
    slot = a.slots[entry];
    key_count = a.key_counts[int64_t{slot} * a.kv_heads + kv_head];
    query_tiles = query_tiles_of(rows);
  }

  __device__ int count() const { return query_tiles * group; }
  __device__ int query_tile(int i) const { return query_tiles - 1 - i / group; }
  __device__ int query_head(int i) const { return kv_head * group + i % group; }
  __device__ int listed(int i) const { return a.lists.count(query_head(i), first_tile + query_tile(i)); }

  // Longer lists have lower bins.
  __device__ int bin(int listed) const {
    const int longest = key_block_limit(a.causal, key_count, rows, (query_tiles - 1) * kListedQueryTile);
    return longest == 0 ? 0 : kBins - 1 - static_cast<int>(int64_t{listed} * (kBins - 1) / longest);
  }

  __device__ ListedTile tile(int i) const {
    ListedTile tile;
    tile.first_row = first_row;
    tile.query_count = rows;
    tile.first_query = query_tile(i) * kListedQueryTile;
    tile.query_head = query_head(i);
    tile.kv_head = kv_head;
    tile.slot = slot;
    tile.key_count = key_count;
    tile.visible_keys = a.causal ? key_count - rows + tile.first_query + 1 : key_count;
    tile.listed = listed(i);
    tile.key_tiles = (tile.listed + 1) / 2;
    tile.blocks = a.lists.blocks_of(a.lists.list(tile.query_head, first_tile + query_tile(i)));
    for (int back = 0; back < 2; ++back) {
      for (int run = 0; run < 2; ++run) {
        const int place = 2 * (tile.key_tiles - 1 - back) + run;
        const bool present = place >= 0 && place < tile.listed;
        tile.last_first_keys[back][run] = present ? tile.blocks[place] * kKeyBlockTokens : key_count;
      }
    }
    return tile;
  }
};

// One thread block for each batch entry and kv head.
__global__ void __launch_bounds__(kThreads)
    plan_tiles(const __grid_constant__ BlockSparseAttentionArguments a, ListedTile* tiles, int32_t* count) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int bins[kBins];  // first the number of tiles, then the place of the next tile
  ptx::follow_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const TilesOfHead head(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  bins[thread] = 0;
  __syncthreads();
  for (int i = thread; i < head.count(); i += kThreads) atomicAdd(&bins[head.bin(head.listed(i))], 1);
  __syncthreads();
  Scan(scan).ExclusiveSum(bins[thread], bins[thread]);
  __syncthreads();
  ListedTile* first = tiles + int64_t{head.first_tile} * a.query_heads + head.kv_head * head.count();
  for (int i = thread; i < head.count(); i += kThreads) {
    const ListedTile tile = head.tile(i);
    first[atomicAdd(&bins[head.bin(tile.listed)], 1)] = tile;
  }
  if (head.entry == a.batch - 1 && head.kv_head == 0 && thread == 0) {
    *count = (head.first_tile + head.query_tiles) * a.query_heads;
  }
}

}  // namespace

size_t listed_plan_bytes(const PagedAttentionArguments& a) {
  const size_t most_tiles = static_cast<size_t>(a.query_tokens / kListedQueryTile + a.batch) * a.query_heads;
  return kCountBytes + (most_tiles * sizeof(ListedTile) + 255) / 256 * 256;
}

Status plan_listed_tiles(const BlockSparseAttentionArguments& a, void* memory, cudaStream_t stream, ListedPlan* plan) {
  auto* count = static_cast<int32_t*>(memory);
  auto* tiles = reinterpret_cast<ListedTile*>(static_cast<char*>(memory) + kCountBytes);
  *plan = {tiles, count};
  const dim3 blocks(static_cast<unsigned>(a.batch), static_cast<unsigned>(a.kv_heads));
  return launch_overlapped(plan_tiles, blocks, kThreads, 0, stream, a, tiles, count);
}

}  // namespace kv
