// One thread block lists what the cache lacks, then the places that hold nothing, and brings both together.
#include <cub/block/block_scan.cuh>

#include "kernels/block-metadata/block-metadata.h"
#include "kernels/place-blocks/place-blocks.h"
#include "ptx/dependent-launch.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/entry-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 1024;
constexpr int kEach = 8;  // that follow each other, of a thread
constexpr int kAtOnce = kThreads * kEach;

using Scan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Calls take(i, rank) for those of the numbers 0 to `count` - 1 that is_wanted(i) holds for, `first` of which are ranked
// already, until there are `most`. Returns how many there are then, or more. All threads call it.
template <class IsWanted, class Take>
__device__ int rank_wanted(int count, int first, int most, typename Scan::TempStorage& storage, IsWanted is_wanted, Take take) {
  for (int start = 0; start < count && first < most; start += kAtOnce) {
    const int own = start + static_cast<int>(threadIdx.x) * kEach;
    unsigned wanted = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (own + i < count && is_wanted(own + i)) wanted |= 1u << i;
    }
    int rank, all;
    Scan(storage).ExclusiveSum(__popc(wanted), rank, all);
    rank += first;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((wanted >> i & 1) != 0 && rank < most) take(own + i, rank++);
    }
    first += all;
    __syncthreads();  // the storage is used again
  }
  return first;
}

__global__ void __launch_bounds__(kThreads, 1)
    place_filled(const __grid_constant__ PlaceBlocksArguments a, int32_t* places, FaultSink faults) {
  __shared__ typename Scan::TempStorage storage;
  ptx::follow_previous_kernel();
  int32_t* sources = a.loads;
  int32_t* targets = a.loads + a.most_loads;  // host blocks, until they have places
  int lacking = 0;
  for (int entry = 0; entry < a.batch; ++entry) {
    // Where the n-th block of the entry is in the tables, or -1: the first of every kv head, then the next.
    const auto at = [&](int n) -> int64_t {
      const EntryBlocks head(a, entry, n % a.kv_heads, faults);
      const FilledBlocks filled(head.tokens, head.rows, a.block_tokens);
      const int index = filled.first + n / a.kv_heads;
      return index < a.sink_blocks || index >= filled.end ? -1 : head.cache_head * a.table_width + index;
    };
    const EntryBlocks any(a, entry, 0, faults);
    const int most = any.rows == 0 ? 0 : min(any.rows / a.block_tokens + 1, a.table_width) * a.kv_heads;
    const auto is_lacking = [&](int n) {
      const int64_t in_tables = at(n);
      const int32_t block = in_tables < 0 ? -1 : checked_block(a.block_table[in_tables], a.block_count, faults);
      return block >= 0 && !a.is_cached(a.where[block]);
    };
    lacking = rank_wanted(most, lacking, a.most_loads, storage, is_lacking, [&](int n, int rank) {
      const int64_t in_tables = at(n);
      sources[rank] = a.source_table[in_tables];
      targets[rank] = a.block_table[in_tables];
    });
  }
  const auto holds_nothing = [&](int place) {
    const int32_t block = a.holds[place];
    return block < 0 || block >= a.block_count || a.where[block] != a.first_cached + place;
  };
  const int free = rank_wanted(a.cached, 0, lacking, storage, holds_nothing, [&](int place, int rank) { places[rank] = place; });
  __syncthreads();
  const int loads = min(lacking, free);
  for (int i = static_cast<int>(threadIdx.x); i < loads; i += kThreads) {
    const int32_t place = places[i], block = targets[i];
    a.holds[place] = block;
    a.used_at[place] = 0;
    a.where[block] = a.first_cached + place;
    targets[i] = a.first_cached + place;
  }
  if (threadIdx.x == 0) a.load_count[0] = loads;
}

}  // namespace

Status place_blocks_cuda(const PlaceBlocksArguments& a, ExecutionContext& context) {
  auto* places = static_cast<int32_t*>(context.workspace(static_cast<size_t>(a.most_loads) * sizeof(int32_t) + 1));
  if (places == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for a list of places");
  return launch_overlapped(place_filled, dim3(1), dim3(kThreads), 0, stream_of(context), a, places, context.faults(describe_paged_fault));
}

}  // namespace kv
