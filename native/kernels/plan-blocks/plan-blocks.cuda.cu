// Two kernels: every list looks its blocks up and claims those that are missing; one thread block, or a cluster of them that
// share the places of a large cache, gives them places and tells the lists. A claim is a place below -1 that says which entry of the lists made it, the lowest of several.
#include <cub/block/block_scan.cuh>

#include "kernels/plan-blocks/plan-blocks.h"
#include "ptx/cluster.cuda.h"
#include "ptx/dependent-launch.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/entry-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kListThreads = 128;
constexpr int kThreads = 1024;
constexpr int kAtOnce = 8;       // loads that a thread has under way
constexpr int kHeld = 32 * 1024;  // places of a thread block whose ages shared memory holds; those of more are in working memory
constexpr int kCluster = 8;       // thread blocks for caches of more than kAlone places, on Hopper
constexpr int kAlone = 8 * 1024;
constexpr int kBins = 256;         // counts of places, from those that are unused for longest on

constexpr int32_t claim_of(int entry) { return -2 - entry; }

// In working memory that is zero between steps.
struct Totals {
  int missing;
  int cached;
};

struct Launch {
  PlanBlocksArguments a;
  FaultSink faults;
  Totals* totals;
  int32_t* missing;     // [batch, kv_head, room]: host blocks that the lists lack; -1 for others
  int32_t* claimed_by;  // [load]: the entry of the lists that claimed it
  uint32_t* ages;       // [cached], where shared memory has no room
};

__device__ inline int blocks_of(const PlanBlocksArguments& a, const EntryBlocks& entry) {
  return static_cast<int>((int64_t{entry.tokens} + a.block_tokens - 1) / a.block_tokens);
}

// The count of a list, or 0 and a fault. All threads call it.
__device__ int checked_count(const Launch& launch, const EntryBlocks& entry, const int32_t* chosen) {
  const PlanBlocksArguments& a = launch.a;
  const int count = entry.rows == 0 ? 0 : a.chosen_counts[entry.cache_head];
  const int blocks = blocks_of(a, entry);
  bool right = count >= 0 && count <= a.room;
  for (int i = static_cast<int>(threadIdx.x); right && i < count; i += kListThreads) {
    right = chosen[i] >= (i == 0 ? 0 : chosen[i - 1] + 1) && chosen[i] < blocks;
  }
  if (__syncthreads_and(right)) return count;
  if (threadIdx.x == 0) report_fault(launch.faults, PlanBlocksFault::list_out_of_range, entry.cache_head / a.kv_heads);
  return 0;
}

// `found` was seen in the place.
__device__ inline void claim(int32_t* place, int32_t found, int entry) {
  if (found >= -1 && atomicCAS(place, found, claim_of(entry)) == found) return;
  atomicMax(place, claim_of(entry));
}

// Blocks that the last steps chose. Each thread gets its part of the count.
__device__ int own_working_set(const PlanBlocksArguments& a, const int32_t* history, uint32_t* marks) {
  int marked = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kWorkingSetSteps * a.room; i += kListThreads) {
    const int32_t block = history[i];
    if (block < 0 || block >= a.table_width) continue;
    const uint32_t bit = 1u << block % 32;
    marked += (atomicOr(marks + block / 32, bit) & bit) == 0 ? 1 : 0;
  }
  return marked;
}

__global__ void __launch_bounds__(kListThreads) look_up(const __grid_constant__ Launch launch) {
  extern __shared__ uint32_t marks[];
  __shared__ int hits, missed, working_set;
  ptx::follow_previous_kernel();
  const PlanBlocksArguments& a = launch.a;
  const int thread = static_cast<int>(threadIdx.x);
  const int list = static_cast<int>(blockIdx.y) * a.kv_heads + static_cast<int>(blockIdx.x);
  const EntryBlocks entry(a, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x), launch.faults);
  int32_t* missing = launch.missing + int64_t{list} * a.room;
  const int32_t* chosen = a.chosen + entry.cache_head * a.room;
  const int count = checked_count(launch, entry, chosen);
  if (entry.rows == 0) {
    for (int i = thread; i < a.room; i += kListThreads) missing[i] = -1;
    return;
  }
  BlockDemand demand = a.demand[entry.cache_head];
  int32_t* history = a.history + entry.cache_head * kWorkingSetSteps * a.room;
  if (demand.steps <= 0) {
    demand = {};
    for (int i = thread; i < kWorkingSetSteps * a.room; i += kListThreads) history[i] = -1;
  }
  for (int i = thread; i * 32 < a.table_width; i += kListThreads) marks[i] = 0;
  if (thread == 0) hits = missed = working_set = 0;
  __syncthreads();
  const int blocks = blocks_of(a, entry);
  const int32_t now = a.clock[0] + 1;
  int32_t* newest = history + demand.steps % kWorkingSetSteps * a.room;
  int own_hits = 0, own_missed = 0;
  for (int i = thread; i < a.room; i += kListThreads) {
    int32_t lacking = -1, cached = -1;
    if (i < count) {
      const int32_t fixed = a.fixed_place(entry.cache_head, chosen[i], blocks);
      if (fixed >= 0) {
        a.read_table[entry.cache_head * a.room + i] = fixed;
      } else {
        cached = chosen[i];
        const int32_t block = checked_block(a.block_table[entry.cache_head * a.table_width + cached], a.block_count, launch.faults);
        if (block >= 0) {
          const int32_t place = *static_cast<volatile int32_t*>(a.where + block);
          if (a.is_cached(place)) {
            a.used_at[place - a.first_cached] = now;
            a.read_table[entry.cache_head * a.room + i] = place;
            ++own_hits;
          } else {
            claim(a.where + block, place, list * a.room + i);
            lacking = block;
            ++own_missed;
          }
        }
      }
    }
    missing[i] = lacking;
    newest[i] = cached;
  }
  __syncthreads();
  const int own_set = own_working_set(a, history, marks);
  atomicAdd(&hits, own_hits);
  atomicAdd(&missed, own_missed);
  atomicAdd(&working_set, own_set);
  __syncthreads();
  if (thread != 0) return;
  a.demand[entry.cache_head] = {demand.steps + 1, working_set, demand.hits + hits, demand.misses + missed};
  a.read_counts[entry.cache_head] = a.tokens_of(count, entry.tokens, blocks);
  if (missed > 0) atomicAdd(&launch.totals->missing, missed);
  atomicAdd(&launch.totals->cached, hits + missed);
}

// Candidates that follow each other, for each thread.
struct Share {
  int first;
  int end;
  __device__ explicit Share(int count) {
    const int each = (count + kThreads - 1) / kThreads;
    first = min(static_cast<int>(threadIdx.x) * each, count);
    end = min(first + each, count);
  }
};

using Scan = cub::BlockScan<uint64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// What a thread block of the cluster has found, for the others.
struct PlanShared {
  alignas(16) int4 claims;          // its sum is of the first number
  alignas(16) int bins[2][kBins];   // of turns that follow each other
  typename Scan::TempStorage storage;
};

// The sum over the thread blocks of a cluster of the number that they have here, and over those before this one. All lanes call it.
struct ClusterSum {
  int all, before;
  __device__ ClusterSum(const int4& here, int blocks, int rank) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const uint32_t own = lane < blocks ? ptx::cluster_load(&here, static_cast<uint32_t>(lane)).x : 0;
    all = static_cast<int>(__reduce_add_sync(0xffffffffu, own));
    before = static_cast<int>(__reduce_add_sync(0xffffffffu, lane < rank ? own : 0));
  }
};

// The places of a thread block of the cluster.
struct OwnPlaces {
  int first;
  int count;
  __device__ OwnPlaces(int cached, int blocks, int rank) {
    const int each = (cached + blocks - 1) / blocks;
    first = min(rank * each, cached);
    count = min(each, cached - first);
  }
};

// Counts a place in its bin, unless that is -1. All lanes call it; most of them have the same.
__device__ inline void count_in(int* bins, int bin) {
  const uint32_t alike = __match_any_sync(0xffffffffu, bin);
  if (bin >= 0 && (alike & ((1u << threadIdx.x % kWarp) - 1)) == 0) atomicAdd(bins + bin, __popc(alike));
}

// Bins of the first turn: places that hold nothing or what was never chosen, those that were chosen too long ago, and of each
// recent step.
constexpr int kOlder = 1;
__device__ inline int first_bin(uint32_t age, uint32_t now) {
  return age == 0 ? 0 : kBins - 1 - static_cast<int>(min(now - age, static_cast<uint32_t>(kBins - 1 - kOlder)));
}

// When each of the places was last chosen; 0 if it holds nothing. Counts them. All threads call it.
__device__ void find_ages(const PlanBlocksArguments& a, const OwnPlaces& places, uint32_t now, uint32_t* ages, int* bins) {
  for (int start = 0; start < places.count; start += kAtOnce * kThreads) {
    int32_t held[kAtOnce], found[kAtOnce];
    uint32_t used[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own = start + i * kThreads + static_cast<int>(threadIdx.x), place = places.first + own;
      held[i] = own < places.count ? a.holds[place] : -1;
      used[i] = own < places.count ? static_cast<uint32_t>(a.used_at[place]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) found[i] = held[i] >= 0 && held[i] < a.block_count ? a.where[held[i]] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i * kThreads >= places.count) break;
      const int own = start + i * kThreads + static_cast<int>(threadIdx.x);
      const bool is_place = own < places.count;
      const uint32_t age = is_place && found[i] == a.first_cached + places.first + own ? min(used[i], now) : 0;
      if (is_place) ages[own] = age;
      count_in(bins, is_place ? first_bin(age, now) : -1);
    }
  }
}

// Which places leave: those that were chosen before `age`, and of it the first.
struct Cut {
  uint32_t age;
  int older;                      // places of the cluster that leave whatever `age` is
  int older_before, same_before;  // of the thread blocks before this one
};

// The bin in which the cluster's places reach the wanted number, and how many are in those before it.
struct BinCut {
  int bin;
  int older, older_before, same_before;
};

// Every lane of one warp calls it.
__device__ BinCut cut_of_bins(const int* bins, int wanted, int blocks, int rank) {
  constexpr int kEach = kBins / kWarp, kTogether = 4;
  const int first = static_cast<int>(threadIdx.x) % kWarp * kEach;
  int counts[kEach] = {}, before[kEach] = {};
  for (int start = 0; start < blocks; start += kTogether) {
    uint4 found[kTogether][kEach / 4];
#pragma unroll
    for (int i = 0; i < kTogether * kEach / 4; ++i) {
      const int other = start + i / (kEach / 4), part = i % (kEach / 4);
      found[i / (kEach / 4)][part] = other < blocks ? ptx::cluster_load(bins + first + 4 * part, static_cast<uint32_t>(other)) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kTogether * kEach; ++i) {
      const uint4& four = found[i / kEach][i % kEach / 4];
      const uint32_t own[4] = {four.x, four.y, four.z, four.w};
      counts[i % kEach] += static_cast<int>(own[i % 4]);
      before[i % kEach] += start + i / kEach < rank ? static_cast<int>(own[i % 4]) : 0;
    }
  }
  int sum = 0, sum_before = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sum += counts[i];
    sum_before += before[i];
  }
  int older = sum, older_before = sum_before;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int from = __shfl_up_sync(0xffffffffu, older, distance), from_before = __shfl_up_sync(0xffffffffu, older_before, distance);
    older += first >= distance * kEach ? from : 0;
    older_before += first >= distance * kEach ? from_before : 0;
  }
  const uint32_t reached = __ballot_sync(0xffffffffu, older >= wanted);
  BinCut cut{first, older - sum, older_before - sum_before, before[0]};
  bool is_passed = false;
#pragma unroll
  for (int i = 0; i + 1 < kEach; ++i) {
    is_passed = is_passed || cut.older + counts[i] >= wanted;
    if (is_passed) continue;
    cut = {first + i + 1, cut.older + counts[i], cut.older_before + before[i], before[i + 1]};
  }
  const int source = reached == 0 ? kWarp - 1 : __ffs(static_cast<int>(reached)) - 1;
  cut.bin = __shfl_sync(0xffffffffu, cut.bin, source);
  cut.older = __shfl_sync(0xffffffffu, cut.older, source);
  cut.older_before = __shfl_sync(0xffffffffu, cut.older_before, source);
  cut.same_before = __shfl_sync(0xffffffffu, cut.same_before, source);
  return cut;
}

// Finds the cut, of which `found` is the first turn's, where that is not of one age: 8 bits of the age at a time. All threads of
// the cluster call it.
__device__ Cut exact_cut(const uint32_t* ages, int count, int wanted, uint32_t now, PlanShared& shared, BinCut& found, int blocks, int rank) {
  const BinCut first = found;
  if (first.bin != kOlder) return {first.bin == 0 ? 0 : now - static_cast<uint32_t>(kBins - 1 - first.bin), first.older, first.older_before, first.same_before};
  Cut cut{1, first.older, first.older_before, 0};
  uint32_t most = now - static_cast<uint32_t>(kBins - 1 - kOlder);
  for (int turn = 1;; turn ^= 1) {
    const int shift = max(0, 24 - __clz(static_cast<int>(most - cut.age)));
    for (int start = 0; start < count; start += kThreads) {
      const int i = start + static_cast<int>(threadIdx.x);
      const uint32_t age = i < count ? ages[i] : 0;
      count_in(shared.bins[turn], age >= cut.age && age <= most ? static_cast<int>((age - cut.age) >> shift) : -1);
    }
    ptx::cluster_sync();
    // Everybody has read what was counted before.
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) shared.bins[turn ^ 1][i] = 0;
    if (threadIdx.x < kWarp) {
      const BinCut own = cut_of_bins(shared.bins[turn], wanted - cut.older, blocks, rank);
      if (threadIdx.x == 0) found = own;
    }
    __syncthreads();
    const BinCut bin = found;
    cut = {cut.age + (static_cast<uint32_t>(bin.bin) << shift), cut.older + bin.older, cut.older_before + bin.older_before, bin.same_before};
    if (shift == 0) return cut;
    most = min(most, cut.age + (1u << shift) - 1);
  }
}

// Calls use(entry, block) for each of a thread's entries that claimed what it lacks, in order.
template <class Use>
__device__ inline void for_each_claim(const Launch& launch, int first, int end, Use use) {
  for (; first < end; first += kAtOnce) {
    int32_t blocks[kAtOnce], found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) blocks[i] = first + i < end ? launch.missing[first + i] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) found[i] = blocks[i] >= 0 ? launch.a.where[blocks[i]] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (blocks[i] >= 0 && found[i] == claim_of(first + i)) use(first + i, blocks[i]);
    }
  }
}

// Entries of the lists that follow each other, of a thread block and of each thread of it.
struct OwnEntries {
  int first;
  int end;
  __device__ OwnEntries(int entries, int blocks, int rank) {
    const int each = (entries + blocks - 1) / blocks;
    const int block_first = min(rank * each, entries), count = min(each, entries - block_first);
    const Share share(count);
    first = block_first + share.first;
    end = block_first + share.end;
  }
};

// Lists the places of this thread block whose blocks leave, behind those of the thread blocks before it. All threads call it.
__device__ void list_places(const PlanBlocksArguments& a, const OwnPlaces& places, const uint32_t* ages, const Cut& cut, int loads,
                            PlanShared& shared) {
  const Share share(places.count);
  uint64_t own = 0, before, all;  // the lower word counts those below the cut's age, the upper one those of it
  for (int i = share.first; i < share.end; ++i) own += ages[i] < cut.age ? 1 : ages[i] == cut.age ? uint64_t{1} << 32 : 0;
  Scan(shared.storage).ExclusiveSum(own, before, all);
  const int equal = loads - cut.older;
  int below = cut.older_before + static_cast<int>(static_cast<uint32_t>(before)), same = cut.same_before + static_cast<int>(before >> 32);
  int32_t* to = a.loads + a.most_loads;
  for (int i = share.first; i < share.end; ++i) {
    const uint32_t age = ages[i];
    if (age < cut.age || (age == cut.age && same < equal)) {
      const int place = places.first + i;
      to[below + min(same, equal)] = place;
      const int32_t former = a.holds[place];
      if (age > 0 || (former >= 0 && former < a.block_count && a.where[former] == a.first_cached + place)) a.where[former] = -1;
    }
    below += age < cut.age ? 1 : 0;
    same += age == cut.age ? 1 : 0;
  }
}

// Writes where a list finds an entry of it.
__device__ inline void tell(const PlanBlocksArguments& a, int entry, int32_t place) {
  const int list = entry / a.room;
  const int64_t cache_head = int64_t{a.slots[list / a.kv_heads]} * a.kv_heads + list % a.kv_heads;
  a.read_table[cache_head * a.room + entry % a.room] = place;
}

// Tells every list where the blocks are that it lacked: the threads from `first` on have an entry each.
__device__ void tell_places(const Launch& launch, int first, int threads) {
  const PlanBlocksArguments& a = launch.a;
  const int entries = a.batch * a.kv_heads * a.room;
  for (; first < entries; first += kAtOnce * threads) {
    int32_t blocks[kAtOnce], places[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int entry = first + i * threads;
      blocks[i] = entry < entries ? launch.missing[entry] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) places[i] = blocks[i] >= 0 ? a.where[blocks[i]] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (blocks[i] >= 0) tell(a, first + i * threads, places[i]);
    }
  }
}

// One cluster of gridDim.x thread blocks.
__global__ void __launch_bounds__(kThreads, 1) give_places(const __grid_constant__ Launch launch) {
  extern __shared__ uint32_t held[];
  __shared__ PlanShared shared;
  __shared__ BinCut found;
  ptx::follow_previous_kernel();
  const PlanBlocksArguments& a = launch.a;
  const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const bool is_first = rank == 0 && threadIdx.x == 0;
  const int32_t now = a.clock[0] + 1;
  const Totals totals = *launch.totals;
  if (totals.missing == 0) {
    // The others see no blocks missing either way.
    __syncthreads();
    if (!is_first) return;
    *launch.totals = {};
    a.clock[0] = now;
    a.load_count[0] = 0;
    return;
  }
  const OwnEntries entries(a.batch * a.kv_heads * a.room, blocks, rank);
  if (totals.cached > a.cached) {
    for_each_claim(launch, entries.first, entries.end, [&](int, int32_t block) { a.where[block] = -1; });
    ptx::cluster_sync();
    if (!is_first) return;
    report_fault(launch.faults, PlanBlocksFault::cache_too_small, totals.cached, 0, a.cached);
    *launch.totals = {};
    a.clock[0] = now;
    a.load_count[0] = 0;
    return;
  }
  const OwnPlaces places(a.cached, blocks, rank);
  uint32_t* ages = (a.cached + blocks - 1) / blocks <= kHeld ? held : launch.ages + places.first;
  if (threadIdx.x < 2 * kBins) shared.bins[threadIdx.x / kBins][threadIdx.x % kBins] = 0;
  __syncthreads();
  find_ages(a, places, static_cast<uint32_t>(now), ages, shared.bins[0]);
  uint64_t own = 0, before, all;
  for_each_claim(launch, entries.first, entries.end, [&](int, int32_t) { ++own; });
  Scan(shared.storage).ExclusiveSum(own, before, all);
  if (threadIdx.x == 0) shared.claims = {static_cast<int>(all), 0, 0, 0};
  ptx::cluster_sync();
  const ClusterSum claims(shared.claims, blocks, rank);
  const int loads = claims.all;
  if (is_first) {
    *launch.totals = {};
    a.clock[0] = now;
    a.load_count[0] = loads;
  }
  if (threadIdx.x < kWarp) {
    const BinCut own_cut = cut_of_bins(shared.bins[0], loads, blocks, rank);
    if (threadIdx.x == 0) found = own_cut;
  }
  // In the order of the lists.
  int next = claims.before + static_cast<int>(before);
  for_each_claim(launch, entries.first, entries.end, [&](int entry, int32_t block) {
    a.loads[next] = block;
    launch.claimed_by[next++] = entry;
  });
  __syncthreads();
  const Cut cut = exact_cut(ages, places.count, loads, static_cast<uint32_t>(now), shared, found, blocks, rank);
  list_places(a, places, ages, cut, loads, shared);
  ptx::cluster_sync();
  const int thread = rank * kThreads + static_cast<int>(threadIdx.x), threads = blocks * kThreads;
  int32_t* to = a.loads + a.most_loads;
  for (int i = thread; i < loads; i += threads) {
    const int32_t block = a.loads[i], place = to[i], entry = launch.claimed_by[i];
    a.holds[place] = block;
    a.used_at[place] = now;
    to[i] = a.first_cached + place;
    a.where[block] = a.first_cached + place;
    tell(a, entry, a.first_cached + place);
  }
  // Other lists lack some of these blocks too.
  if (totals.missing == loads) return;
  ptx::cluster_sync();
  tell_places(launch, thread, threads);
}

}  // namespace

Status plan_blocks_cuda(const PlanBlocksArguments& a, ExecutionContext& context) {
  int major = 0;
  Status status = find_compute_capability(major);
  if (!status.ok()) return status;
  const int blocks = major >= 9 && a.cached > kAlone ? kCluster : 1;
  const int each = (a.cached + blocks - 1) / blocks;
  const size_t entries = static_cast<size_t>(a.batch) * static_cast<size_t>(a.kv_heads) * static_cast<size_t>(a.room);
  const size_t held_bytes = each <= kHeld ? static_cast<size_t>(each) * sizeof(uint32_t) : 0;
  const size_t age_bytes = held_bytes == 0 ? static_cast<size_t>(a.cached) * sizeof(uint32_t) : 0;
  const size_t mark_bytes = (static_cast<size_t>(a.table_width) / 32 + 1) * sizeof(uint32_t);
  auto* memory = static_cast<char*>(context.workspace(2 * entries * sizeof(int32_t) + age_bytes + 1));
  auto* totals = static_cast<Totals*>(context.zeroed_workspace(sizeof(Totals)));
  if (memory == nullptr || totals == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for what a plan works in");
  Launch launch;
  launch.a = a;
  launch.faults = context.faults(describe_plan_blocks_fault);
  launch.totals = totals;
  launch.missing = reinterpret_cast<int32_t*>(memory);
  launch.claimed_by = launch.missing + entries;
  launch.ages = reinterpret_cast<uint32_t*>(memory) + 2 * entries;
  cudaError_t error = cudaFuncSetAttribute(look_up, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(mark_bytes));
  if (error == cudaSuccess) error = cudaFuncSetAttribute(give_places, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeld * sizeof(uint32_t));
  if (error != cudaSuccess) return cuda_status(error);
  const dim3 lists(static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
  cudaStream_t stream = stream_of(context);
  if (a.batch > 0) status = launch_overlapped(look_up, lists, dim3(kListThreads), mark_bytes, stream, launch);
  if (!status.ok()) return status;
  const auto cluster = static_cast<unsigned>(blocks);
  return launch_overlapped_clusters(give_places, dim3(cluster), dim3(kThreads), cluster, held_bytes, stream, launch);
}

}  // namespace kv
