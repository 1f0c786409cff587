#include "shared/attention/key-block-lists.cuda.h"

#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kCheckWarps = 8;

__device__ int64_t count_query_tiles(const PagedBatch& b) {
  int64_t tiles = 0;
  for (int32_t entry = 0; entry < b.batch; ++entry) {
    tiles += query_tiles_of(b.query_start[entry + 1] - b.query_start[entry]);
  }
  return tiles;
}

// Each warp checks the list of one query head and tile.
__global__ void __launch_bounds__(kCheckWarps* kWarp)
    check_lists(const __grid_constant__ PagedAttentionArguments a, const __grid_constant__ KeyBlockLists lists,
                int32_t* counts, FaultSink faults) {
  ptx::follow_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t list = int64_t{blockIdx.x} * kCheckWarps + threadIdx.x / kWarp;
  if (list == 0 && lane == 0) {
    const int64_t tiles = count_query_tiles(a);
    if (tiles > lists.query_tiles) {
      report_fault(faults, KeyBlockListFault::too_few_query_tiles, tiles, 0, lists.query_tiles);
    }
  }
  if (list >= int64_t{a.query_heads} * lists.query_tiles) return;
  const int32_t head = static_cast<int32_t>(list / lists.query_tiles);
  const int32_t tile = static_cast<int32_t>(list % lists.query_tiles);

  int32_t entry = 0;
  int32_t first_tile = 0;  // tiles of the entry
  int32_t end_tile = 0;
  for (; entry < a.batch; ++entry) {
    first_tile = end_tile;
    end_tile += query_tiles_of(a.query_start[entry + 1] - a.query_start[entry]);
    if (tile < end_tile) break;
  }
  int32_t count = 0;
  if (entry < a.batch) {
    const int32_t queries = a.query_start[entry + 1] - a.query_start[entry];
    const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head / (a.query_heads / a.kv_heads);
    const int32_t limit =
        key_block_limit(a.causal, a.key_counts[cache_head], queries, (tile - first_tile) * kListedQueryTile);
    count = lists.counts[list];
    bool fits = count >= 0 && count <= lists.capacity;
    if (fits) {
      const int32_t* blocks = lists.blocks_of(list);
      for (int32_t i = lane; i < count; i += kWarp) {
        const int32_t previous = i > 0 ? blocks[i - 1] : -1;
        fits = fits && blocks[i] > previous && blocks[i] < limit;
      }
    }
    if (!__all_sync(0xffffffffu, fits)) {
      count = 0;
      if (lane == 0) report_fault(faults, KeyBlockListFault::list, head, tile, limit);
    }
  }
  if (lane == 0) counts[list] = count;
}

}  // namespace

size_t checked_lists_bytes(const PagedAttentionArguments& a, const KeyBlockLists& lists) {
  const size_t bytes = static_cast<size_t>(a.query_heads) * static_cast<size_t>(lists.query_tiles) * sizeof(int32_t);
  return (bytes + 255) / 256 * 256;
}

Status check_lists_cuda(const PagedAttentionArguments& a, void* memory, ExecutionContext& context,
                        KeyBlockLists* lists) {
  auto* counts = static_cast<int32_t*>(memory);
  const int64_t warps = int64_t{a.query_heads} * lists->query_tiles;
  const dim3 blocks(static_cast<unsigned>(warps / kCheckWarps + 1));
  const Status status = launch_overlapped(check_lists, blocks, kCheckWarps * kWarp, 0, stream_of(context), a, *lists,
                                          counts, context.faults(describe_key_block_list_fault));
  lists->counts = counts;
  return status;
}

}  // namespace kv
