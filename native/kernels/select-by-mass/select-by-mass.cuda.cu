// Choice of tokens on a CUDA device, in steps over all scores: the largest, sums of shares in bins, marks. Each head's
// last tokens are then found among those of one bin. Lists without room for all go through the same steps once more, by
// the largest share of each token.
#define KV_ISA cuda
#include <algorithm>

#include "kernels/select-by-mass/select-by-mass-bins.cuda.h"
#include "kernels/select-by-mass/select-by-mass-chunks.cuda.h"
#include "kernels/select-by-mass/select-by-mass-team.cuda.h"
#include "shared/cuda/arrivals.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/block-entry.h"
#include "shared/paged/check-tables.cuda.h"

namespace kv {
namespace {

// ---- Start ----

// A thread block for each row and query head clears what is counted there; the first of a kv head finds the row's slot, and the
// ranges of its heads' scores where these are given.
__global__ void __launch_bounds__(kThreads) start(const __grid_constant__ Launch launch) {
  __shared__ int entry;
  __shared__ bool has_ranges;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const int64_t row_head = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  clear_bins(launch.memory.bins + row_head * kBins);
  if (row_head % a.group() != 0) return;
  if (thread == 0) entry = -1;
  __syncthreads();
  const int64_t list = row_head / a.group();
  if (a.score_tokens > a.most_tokens()) clear_bins(launch.memory.list_bins + list * kBins);
  const int64_t row = list / a.kv_heads;
  bool ascends = true;
  bool known = true;
  for (int i = thread; i < a.batch; i += kThreads) {
    ascends = ascends && rows_ascend(a, i);
    known = known && slot_exists(a, i);
    if (a.query_start[i] <= row && row < a.query_start[i + 1]) entry = i;
  }
  ascends = __syncthreads_and(ascends);
  known = __syncthreads_and(known);
  if (thread == 0) {
    const ListState state = list_of(launch, list, entry, ascends, known);
    launch.memory.lists[list] = state;
    has_ranges = a.ranges != nullptr && state.tokens > 0;
  }
  __syncthreads();
  for (int h = thread / kWarp; h < a.group(); h += kWarps) {
    HeadState head{};
    head.above = head.in_bin = NAN;
    const auto* parts = reinterpret_cast<const float2*>(a.ranges) + (row_head + h) * a.range_parts;
    for (int part = thread % kWarp; has_ranges && part < a.range_parts; part += kWarp) {
      head.scores.most = max(head.scores.most, score_order(parts[part].y));
      head.scores.least_inverted = max(head.scores.least_inverted, ~score_order(parts[part].x));
    }
    head.scores.reduce();
    if (thread % kWarp == 0) launch.memory.heads[row_head + h] = head;
  }
}

// ---- Shares of each head ----

// The range of a head's scores, where it is not given.
__global__ void __launch_bounds__(kSumThreads) find_range(const __grid_constant__ Launch launch) {
  ptx::follow_previous_kernel();
  const HeadChunk chunk(launch, blockIdx.x);
  if (chunk.first >= chunk.end) return;
  const float any = chunk.scores[chunk.first];
  float most = any;
  float least = any;
  bool odd = isnan(any);
  chunk.for_each_four(launch.aligned, any, [&](float4 own) {
    most = fmaxf(fmaxf(fmaxf(most, own.x), fmaxf(own.y, own.z)), own.w);
    least = fminf(fminf(fminf(least, own.x), fminf(own.y, own.z)), own.w);
    odd = odd || isnan(own.x) || isnan(own.y) || isnan(own.z) || isnan(own.w);
  });
  OrderRange range{};
  range.add(score_order(least));
  range.add(odd ? UINT32_MAX : score_order(most));
  chunk.head.scores.include(range);
}

// Sums shares in bins, for the heads that kAgain asks for: all, or those with a bin that holds too many candidates.
template <bool kAgain>
__global__ void __maxnreg__(kRegisters) sum_shares(const __grid_constant__ Launch launch) {
  __shared__ uint32_t low[kBins];  // of a bin's sum the lower 32 bits, and the upper ones
  __shared__ uint32_t high[kBins];
  __shared__ uint32_t factors[kBins];
  __shared__ typename BinScan::Scan::TempStorage storage;
  __shared__ bool last;
  __shared__ uint64_t wanted;
  __shared__ Cut cut;
  ptx::let_next_kernel_start();
  if (kAgain) {
    ptx::wait_for_previous_kernel();
    if (launch.memory.heads[block_from_end() / launch.sum_blocks].wide == 0) return;
  }
  // Here the lower byte says how many bits are dropped. What counts as nothing has no factor.
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kSumThreads) {
    factors[bin] = bin < kShareBins ? (kFactors.of[bin] & ~0xffu) | bits_dropped(kFactors.of[bin]) : 0;
    low[bin] = high[bin] = 0;
  }
  if (!kAgain) ptx::wait_for_previous_kernel();
  __syncthreads();
  const HeadChunk chunk(launch, block_from_end());
  HeadState& head = chunk.head;
  const SelectByMassArguments& a = launch.a;
  const float dense = a.dense_log_sum_exp == nullptr ? -INFINITY : a.dense_log_sum_exp[chunk.row_head];
  HeadSum sum{largest_of(head, dense), 0};
  const ShareBins bins = kAgain ? ShareBins(head) : ShareBins(head, sum.most);
  uint64_t* all_bins = launch.memory.bins + chunk.row_head * kBins;
  if (sum.is_sound() && sum.most > -INFINITY && chunk.first < chunk.end) {
    const auto add = [&](uint32_t bin, uint32_t bits) {
      const uint32_t before = atomicAdd(&low[bin], bits);
      return before > ~bits;
    };
    chunk.for_each_four(launch.aligned, -INFINITY, [&](float4 four) {
      const float own[] = {four.x, four.y, four.z, four.w};
      uint32_t bin[4];
      uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t fixed = fixed_of(sum.most - own[i]);
        const uint32_t factor = factors[cuda::bin_of(fixed)];
        bits[i] = __funnelshift_r(cuda::share_bits(fixed, factor), 0, factor);
        bin[i] = min(bins.of(fixed), kBins - 1u);  // behind the last score
        if (kAgain && (fixed - bins.from) >> head.wide != 0) bin[i] = kBins;
      }
      const uint32_t common = __shfl_sync(0xffffffffu, bin[0], 0);
      if (__all_sync(0xffffffffu, bin[0] == common) && __all_sync(0xffffffffu, bin[1] == common && bin[2] == common && bin[3] == common)) {
        if (kAgain && common == kBins) return;
        const uint32_t all = __reduce_add_sync(0xffffffffu, bits[0] + bits[1] + bits[2] + bits[3]);
        if (threadIdx.x % kWarp == 0 && add(common, all)) atomicAdd(&high[common], 1u);
        return;
      }
      bool carries[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) carries[i] = (!kAgain || bin[i] < kBins) && add(bin[i], bits[i]);
      if (!carries[0] && !carries[1] && !carries[2] && !carries[3]) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (carries[i]) atomicAdd(&high[bin[i]], 1u);
      }
    });
    __syncthreads();
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kSumThreads) {
      const uint64_t own = uint64_t{high[bin]} << 32 | low[bin];
      if (own == 0) continue;
      const int added = bits_added(kFactors.of[cuda::bin_of(bins.first_of(static_cast<uint32_t>(bin)))]);
      atomicAdd(reinterpret_cast<unsigned long long*>(all_bins + bin), own << added);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) last = arrives_last(head.cut.arrivals, static_cast<unsigned>(launch.sum_blocks));
  __syncthreads();
  if (!last) return;
  const BinScan scan(all_bins, storage);
  sum.total = scan.all();
  if (threadIdx.x == 0) {
    cut = kAgain ? head.cut : Cut{-1};
    wanted = kAgain ? cut.wanted : sum.total > 0 ? cuda::wanted_share(sum, dense, a.tau) : 0;
  }
  if (!kAgain && threadIdx.x == kSumThreads - 1) {
    head.sum = sum;
    if (sum.total > 0) head.log_of_all = cuda::log_of_all(sum, dense);
  }
  __syncthreads();
  if (wanted > 0) scan.find(wanted, cut);
  __syncthreads();
  if (threadIdx.x < kWarp && wanted > 0) find_candidates(head, cut, sum.most, bins, !kAgain);
  if (threadIdx.x == kWarp) head.cut = cut;
}

// ---- Marks ----

constexpr int kMarkChunk = 2 * kChunk;

// A thread block has two chunks of a head. It marks what the head takes because it is above the cut's bin, and lists what is
// in the bin.
__global__ void __launch_bounds__(kThreads) mark_tokens(const __grid_constant__ Launch launch) {
  constexpr int kBatch = 4;
  __shared__ ChunkCandidates<kMarkChunk> candidates;
  ptx::follow_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int chunks = (launch.chunks + 1) / 2;
  const int64_t row_head = blockIdx.x / chunks;
  const List list(launch, row_head / launch.a.group());
  const int h = static_cast<int>(row_head % launch.a.group());
  const int first = static_cast<int>(blockIdx.x % chunks) * kMarkChunk;
  const int tokens = list.state.tokens;
  if (first >= tokens) return;
  if (thread == 0) candidates.count = 0;
  __syncthreads();
  HeadState& head = list.heads[h];
  const float above = head.above;
  const float in_bin = head.in_bin;
  const float* scores = list.scores + int64_t{h} * launch.a.score_tokens;
  auto* bytes = reinterpret_cast<uint8_t*>(list.head_words(h)) + first / 8;
#pragma unroll 1
  for (int at = 4 * thread; at < min(kMarkChunk, launch.chunks * kChunk - first); at += 4 * kThreads * kBatch) {
    float4 four[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) four[i] = four_scores(scores, first + at + i * 4 * kThreads, tokens, launch.aligned);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float own[] = {four[i].x, four[i].y, four[i].z, four[i].w};
      uint32_t marks = 0;
      uint32_t counts = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        marks |= own[j] >= above ? 1u << j : 0;
        counts |= own[j] >= in_bin ? 1u << j : 0;
      }
      const uint32_t other = __shfl_down_sync(0xffffffffu, marks, 1);
      if (thread % 2 == 0) bytes[(at + i * 4 * kThreads) / 8] = static_cast<uint8_t>(marks | other << 4);
      candidates.add<4>(counts & ~marks, at + i * 4 * kThreads);
    }
  }
  uint64_t* keys = launch.memory.keys + row_head * kListed;
  candidates.list(head.cut, keys, kListed, first, [&](int token) { return score_order(scores[token]); });
}

// Thread blocks for each row and query head find its last token, and mark what it takes of its bin. One is enough where
// the bin's candidates are listed.
__global__ void __maxnreg__(kRegisters) find_last_tokens(const __grid_constant__ Launch launch) {
  __shared__ KeyThreshold::Shared shared;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const auto row_head = static_cast<int64_t>(blockIdx.x / launch.head_team);
  const List list(launch, row_head / a.group());
  const int h = static_cast<int>(row_head % a.group());
  HeadState& head = list.heads[h];
  const bool listed = head.cut.bin < 0 || head.cut.found <= kListed;
  const Team team(launch.head_team);
  if (listed && team.member() > 0) return;
  uint64_t* keys = launch.memory.keys + row_head * kListed;
  uint32_t* words = list.head_words(h);
  uint64_t own = 0;
  uint64_t wanted = head.cut.wanted;
  int found = static_cast<int>(head.cut.found);
  if (!listed) {
    // Those that found room are not in the range yet.
    OrderRange range{};
    team.for_each(kListed, [&](int i) { range.add(order_of_key(keys[i])); });
    head.cut.range.include(range);
    team.meet();
    auto& memory = *reinterpret_cast<TeamMemory*>(keys);
    TeamThreshold::clear(team, memory, 0);
    team.meet();
    const HeadCandidates candidates(list, h);
    const auto rest = TeamThreshold::find(wanted, team, candidates, list.state.tokens, head.cut.range, memory, shared);
    team.for_each_key(candidates, 0, list.state.tokens, [&](int token, const BatchOfKeys& batch) {
#pragma unroll
      for (int i = 0; i < kKeyBatch; ++i) {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) {
          if (!rest.takes(batch[i][j])) continue;
          own += candidates.amount(batch[i][j]);
          bits |= 1u << j;
        }
        const uint32_t marks = word_of(bits);
        if (marks != 0 && threadIdx.x % 8 == 0) words[token / kWarp + i * kOfLane] |= marks;
      }
      list_rest(rest, batch, head.cut.rest, memory.left);
    });
    add_taken(head, own);
    team.meet();
    if (team.member() > 0) return;
    own = 0;
    wanted = rest.wanted;
    keys = memory.left;
    found = static_cast<int>(__ldcg(&head.cut.rest));
  }
  if (head.cut.bin >= 0) {
    const ListedKeys listed_keys(keys, found);
    const float most = head.sum.most;
    const auto for_each = [&](auto body) {
      listed_keys.for_each([&](uint64_t key) { body(key, share_below(most - score_of_key(key))); });
    };
    const uint64_t threshold = KeyThreshold::find(wanted, shared, for_each);
    for_each([&](uint64_t key, uint64_t share) {
      if (key < threshold) return;
      own += share;
      atomicOr(words + token_of(key) / kWarp, 1u << token_of(key) % kWarp);
    });
  }
  add_taken(head, own);
  __syncthreads();
  if (threadIdx.x != 0) return;
  head.taken = __ldcg(&head.taken) + head.cut.above;
  head.made = cuda::weights_of(head.sum, head.taken, a.missing);
}

// A thread block makes the words of a chunk of a list, with what any of its heads takes.
__global__ void __launch_bounds__(kThreads) unite_heads(const __grid_constant__ Launch launch) {
  ptx::follow_previous_kernel();
  const List list(launch, blockIdx.x / launch.chunks);
  const int chunk = static_cast<int>(blockIdx.x % launch.chunks);
  if (chunk * kChunk >= list.state.tokens) return;
  const int word = chunk * kChunkWords + static_cast<int>(threadIdx.x);
  uint32_t own = 0;
  for (int h = 0; h < launch.a.group(); ++h) own |= __ldcg(list.head_words(h) + word);
  list.words()[word] = own;
  count_marks(list, chunk, static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(__popc(own)))));
}

// ---- Lists that have no room for all ----

constexpr int kHeadsAtOnce = 4;

// Counts the marked tokens by their largest share, in bins, and writes down which bin each is in, if the list has no room for
// all.
__global__ void __maxnreg__(kRegisters) count_best(const __grid_constant__ Launch launch) {
  __shared__ unsigned counts[kBins];
  __shared__ typename BinScan::Scan::TempStorage storage;
  __shared__ bool last;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const List list(launch, blockIdx.x / launch.best_blocks);
  const int thread = static_cast<int>(threadIdx.x);
  const int tokens = list.state.tokens;
  const int in_chunks = (tokens + kChunk - 1) / kChunk * kChunk;
  const int own = tokens_of_block(in_chunks, launch.best_blocks);
  const int first = static_cast<int>(blockIdx.x % launch.best_blocks) * own;
  if (ChunkSums(list, 0).all <= a.most_tokens()) return;
  for (int bin = thread; bin < kBins; bin += kSumThreads) counts[bin] = 0;
  __syncthreads();
  const BestBins bins(list);
  const int end = min(first + own, in_chunks);
#pragma unroll 1
  for (int token = first + kOfLane * thread; token < end; token += kOfLane * kSumThreads) {
    float best[kOfLane] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    const bool whole = launch.aligned && token + kOfLane <= tokens;
    for (int first_head = 0; first_head < a.group(); first_head += kHeadsAtOnce) {
      uint32_t marks[kHeadsAtOnce];
      float4 four[kHeadsAtOnce];
      float log_of_all[kHeadsAtOnce];
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) {
        const int h = min(first_head + i, a.group() - 1);
        const float* scores = list.scores + int64_t{h} * a.score_tokens;
        marks[i] = __ldcg(list.head_words(h) + token / kWarp) >> token % kWarp;
        log_of_all[i] = list.heads[h].log_of_all;
        if (whole) four[i] = __ldg(reinterpret_cast<const float4*>(scores + token));
        else four[i] = four_scores(scores, token, tokens, false);
      }
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) {
        const float own[kOfLane] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) best[j] = fmaxf(best[j], (marks[i] >> j & 1) != 0 ? own[j] - log_of_all[i] : -INFINITY);
      }
    }
    uint32_t bin[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) bin[i] = best[i] == -INFINITY ? kNotTaken : bins.of(best[i]);
    *reinterpret_cast<uint2*>(list.best_bins() + token) = make_uint2(bin[0] | bin[1] << 16, bin[2] | bin[3] << 16);
    const uint32_t common = __shfl_sync(0xffffffffu, bin[0], 0);
    if (__all_sync(0xffffffffu, bin[0] == common && bin[1] == common && bin[2] == common && bin[3] == common)) {
      if (common != kNotTaken && thread % kWarp == 0) atomicAdd(&counts[common], static_cast<unsigned>(kOfLane * kWarp));
      continue;
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (bin[i] != kNotTaken) atomicAdd(&counts[bin[i]], 1u);
    }
  }
  __syncthreads();
  for (int bin = thread; bin < kBins; bin += kSumThreads) {
    if (counts[bin] != 0) atomicAdd(reinterpret_cast<unsigned long long*>(list.bins() + bin), static_cast<unsigned long long>(counts[bin]));
  }
  __syncthreads();
  if (thread == 0) last = arrives_last(list.state.cut.arrivals, static_cast<unsigned>(launch.best_blocks));
  __syncthreads();
  if (!last) return;
  for (int h = thread; h < a.group(); h += kSumThreads) list.heads[h].taken = 0;
  const BinScan scan(list.bins(), storage);
  if (thread == 0) list.state.cut.bin = -1;
  __syncthreads();
  if (a.most_tokens() > 0) scan.find(static_cast<uint64_t>(a.most_tokens()), list.state.cut);
}

// Leaves of a list that is cut what is above the cut's bin, and lists what is in the bin.
__global__ void __launch_bounds__(kThreads) mark_best(const __grid_constant__ Launch launch) {
  constexpr int kOwn = 8;
  __shared__ ChunkCandidates<kChunk> candidates;
  ptx::follow_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const List list(launch, blockIdx.x / launch.chunks);
  const int chunk = static_cast<int>(blockIdx.x % launch.chunks);
  const int32_t cut = list.state.cut.bin;
  if (chunk * kChunk >= list.state.tokens || cut == kBins) return;
  if (thread == 0) candidates.count = 0;
  __syncthreads();
  auto* bytes = reinterpret_cast<uint8_t*>(list.words()) + chunk * (kChunk / 8);
  int found = 0;
#pragma unroll
  for (int at = kOwn * thread; at < kChunk; at += kOwn * kThreads) {
    const uint4 own = *reinterpret_cast<const uint4*>(list.best_bins() + chunk * kChunk + at);
    const uint32_t pairs[] = {own.x, own.y, own.z, own.w};
    uint32_t marks = 0;
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const auto bin = static_cast<int32_t>(pairs[i / 2] >> i % 2 * 16 & 0xffff);
      marks |= bin < cut ? 1u << i : 0;
      counts |= bin == cut ? 1u << i : 0;
    }
    bytes[at / 8] = static_cast<uint8_t>(marks);
    found += __popc(marks);
    candidates.add<kOwn>(counts, at);
  }
  count_marks(list, chunk, static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(found))));
  candidates.list(list.state.cut, list.keys(), list.most_listed(), chunk * kChunk, [&](int token) { return list.best_order(token); });
}

// Thread blocks for each list that is cut find the last token that there is room for. One is enough where the bin's candidates
// are listed.
__global__ void __maxnreg__(kRegisters) find_last_best(const __grid_constant__ Launch launch) {
  __shared__ KeyThreshold::Shared shared;
  ptx::follow_previous_kernel();
  const List list(launch, blockIdx.x / launch.list_team);
  Cut& cut = list.state.cut;
  if (cut.bin == kBins || cut.bin < 0) return;
  const unsigned most = list.most_listed();
  const bool listed = cut.found <= most;
  const Team team(launch.list_team);
  if (listed && team.member() > 0) return;
  const int tokens = list.state.tokens;
  uint64_t* keys = list.keys();
  uint64_t wanted = cut.wanted;
  int found = static_cast<int>(cut.found);
  if (!listed) {
    // Those that found room are not in the range yet.
    OrderRange range{};
    team.for_each(static_cast<int>(most), [&](int i) { range.add(order_of_key(keys[i])); });
    cut.range.include(range);
    team.meet();
    auto& memory = *reinterpret_cast<TeamMemory*>(keys);
    TeamThreshold::clear(team, memory, 0);
    team.meet();
    const ListCandidates candidates(list);
    const auto rest = TeamThreshold::find(wanted, team, candidates, tokens, cut.range, memory, shared);
    team.for_each_key(candidates, 0, tokens, [&](int token, const BatchOfKeys& batch) {
      int count = 0;
#pragma unroll
      for (int i = 0; i < kKeyBatch; ++i) {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) bits |= rest.takes(batch[i][j]) ? 1u << j : 0;
        const uint32_t marks = word_of(bits);
        if (marks != 0 && threadIdx.x % 8 == 0) list.words()[token / kWarp + i * kOfLane] |= marks;
        count += __popc(bits);
      }
      count = __reduce_add_sync(0xffffffffu, count);
      if (count > 0 && threadIdx.x % kWarp == 0) atomicAdd(list.chunk_counts() + token / kChunk, count);
      list_rest(rest, batch, cut.rest, memory.left);
    });
    team.meet();
    if (team.member() > 0 || rest.wanted == 0) return;
    wanted = rest.wanted;
    keys = memory.left;
    found = static_cast<int>(__ldcg(&cut.rest));
  }
  const ListedKeys listed_keys(keys, found);
  const auto for_each = [&](auto body) {
    listed_keys.for_each([&](uint64_t key) { body(key, uint64_t{1}); });
  };
  const uint64_t threshold = KeyThreshold::find(wanted, shared, for_each);
  for_each([&](uint64_t key, uint64_t) {
    const int token = token_of(key);
    if (key < threshold) return;
    atomicOr(list.words() + token / kWarp, 1u << token % kWarp);
    atomicAdd(list.chunk_counts() + token / kChunk, 1);
  });
}

constexpr int kAtOnce = 4;  // shares of tokens of a list that a thread makes

// Adds up what share the tokens have that are left of a list that was cut. A thread block has a chunk.
__global__ void __launch_bounds__(kThreads) sum_left(const __grid_constant__ Launch launch) {
  __shared__ ChunkTokens tokens;
  __shared__ bool last;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const List list(launch, blockIdx.x / launch.chunks);
  const int chunk = static_cast<int>(blockIdx.x % launch.chunks);
  if (chunk * kChunk >= list.state.tokens || list.state.cut.bin == kBins) return;
  const int count = tokens.find(list, chunk);
  // Each warp has a head, and part of the tokens.
  const int parts = max(1, kWarps / a.group());
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int unit = static_cast<int>(threadIdx.x) / kWarp; unit < parts * a.group(); unit += kWarps) {
    const int h = unit % a.group();
    uint64_t own = 0;
    for (int at = unit / a.group() * kWarp + lane; at < count; at += kAtOnce * parts * kWarp) {
      int heads[kAtOnce];
      int token[kAtOnce];
      uint64_t shares[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int place = at + i * parts * kWarp;
        heads[i] = h;
        token[i] = place < count ? tokens.token(chunk, place) : -1;
      }
      list.taken_shares(heads, token, shares);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) own += shares[i];
    }
    add_taken(list.heads[h], own);
  }
  __syncthreads();
  const auto chunks = static_cast<unsigned>((list.state.tokens + kChunk - 1) / kChunk);
  if (threadIdx.x == 0) last = arrives_last(list.state.cut.summed, chunks);
  __syncthreads();
  if (!last) return;
  for (int h = static_cast<int>(threadIdx.x); h < a.group(); h += kThreads) {
    HeadState& head = list.heads[h];
    head.made = cuda::weights_of(head.sum, __ldcg(&head.taken), a.missing);
  }
}

// ---- Lists ----

// A thread block writes the tokens of a chunk, each weight by one thread.
__global__ void __launch_bounds__(kThreads) write_lists(const __grid_constant__ Launch launch) {
  __shared__ ChunkTokens tokens;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const unsigned block = block_from_end();
  const List list(launch, block / launch.chunks);
  const int chunk = static_cast<int>(block % launch.chunks);
  const int thread = static_cast<int>(threadIdx.x);
  if (chunk > 0 && chunk * kChunk >= list.state.tokens) return;
  const ChunkSums sums(list, chunk);
  const int group = a.group();
  const int64_t cache_head = int64_t{list.state.slot} * a.kv_heads + list.index % a.kv_heads;
  const int64_t first = list.index * a.capacity + sums.before;
  const auto scale = [&](int value_row) {
    return a.value_scales == nullptr || value_row < 0 ? 1.0f : __uint_as_float(uint32_t{a.value_scales[value_row]} << 16);
  };
  if (chunk == 0) {
    int mean = -1;
    if (a.missing == MissingMass::mean_value && sums.all > 0) {
      mean = a.mean_rows[cache_head];
      if (mean >= int64_t{a.block_count} * kValueBlockTokens) {
        if (thread == 0) {
          report_fault(launch.faults, SelectByMassFault::mean_out_of_range, mean, list.index / a.kv_heads,
                       int64_t{a.block_count} * kValueBlockTokens);
        }
        mean = -1;
      }
    }
    const int64_t behind = list.index * a.capacity + sums.all;
    for (int h = thread; h < group; h += kThreads) {
      a.log_sum_exp[list.index * group + h] = list.heads[h].made.log_sum_exp;
      if (mean >= 0) a.weights[behind * group + h] = list.heads[h].made.missing * scale(mean);
    }
    if (thread == 0) {
      if (mean >= 0) a.value_rows[behind] = mean;
      a.counts[list.index] = mean >= 0 ? sums.all + 1 : sums.all;
    }
    if (list.state.tokens == 0) return;
  }
  const int count = tokens.find(list, chunk);
  const int32_t* table = a.block_table + cache_head * a.table_width;
  const auto value_row = [&](int token) {
    const int32_t block = table[token / kValueBlockTokens];
    if (names_dense(block, a.block_count)) return block * kValueBlockTokens + token % kValueBlockTokens;
    report_fault(launch.faults, PagedFault::block_out_of_range, block);
    return -1;
  };
#pragma unroll 2
  for (int i = thread; i < count; i += kThreads) a.value_rows[first + i] = value_row(tokens.token(chunk, i));
  if (a.weights == nullptr) return;
  for (int first_at = thread; first_at < count * group; first_at += kAtOnce * kThreads) {
    int heads[kAtOnce];
    int token[kAtOnce];
    uint64_t shares[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first_at + i * kThreads;
      heads[i] = at % group;
      token[i] = at < count * group ? tokens.token(chunk, at / group) : -1;
    }
    list.taken_shares(heads, token, shares);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (token[i] < 0) continue;
      const float weight = list.heads[heads[i]].made.weight(shares[i]);
      a.weights[first * group + first_at + i * kThreads] = a.value_scales == nullptr ? weight : weight * scale(value_row(token[i]));
    }
  }
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Status select_by_mass_cuda(const SelectByMassArguments& given, ExecutionContext& context) {
  const size_t rows = static_cast<size_t>(given.query_tokens);
  if (rows == 0) return Status::success();
  Launch launch{};
  launch.a = given;
  launch.faults = context.faults(describe_select_by_mass_fault);
  const auto chunks_of = [&](int tokens) { return std::max(1, (given.score_tokens + tokens - 1) / tokens); };
  launch.chunks = chunks_of(kChunk);
  launch.aligned = given.score_tokens % 4 == 0 && reinterpret_cast<uintptr_t>(given.scores) % 16 == 0;

  const size_t heads = rows * static_cast<size_t>(given.query_heads);
  const size_t lists = rows * static_cast<size_t>(given.kv_heads);
  const size_t chunks = lists * static_cast<size_t>(launch.chunks);
  int major = 0, device = 0, multiprocessors = 0;
  Status status = find_compute_capability(major);
  if (status.ok()) status = cuda_status(cudaGetDevice(&device));
  if (status.ok()) status = cuda_status(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  if (!status.ok()) return status;
  // As many members as there is room for at once, a power of two.
  const auto members = [&](size_t teams) {
    int all = 1;
    while (major >= 9 && all < kMostMembers && all < chunks_of(kTeamTokens) && 2 * all * teams <= static_cast<size_t>(multiprocessors)) all *= 2;
    return all;
  };
  // As many thread blocks as run at once, which add what they have counted to the bins of all.
  const auto blocks_of = [&](size_t rows) { return std::clamp(static_cast<int>(static_cast<size_t>(kSumBlocks * multiprocessors) / rows), 1, launch.chunks); };
  launch.sum_blocks = blocks_of(heads);
  launch.best_blocks = blocks_of(lists);
  launch.head_team = members(heads);
  launch.list_team = members(lists);
  const size_t word_bytes = chunks * kChunkWords * sizeof(uint32_t);
  const bool cuts = given.score_tokens > given.most_tokens();
  const size_t sizes[] = {heads * kBins * sizeof(uint64_t),
                          heads * kListed * sizeof(uint64_t),
                          heads * sizeof(HeadState),
                          lists * sizeof(ListState),
                          word_bytes * static_cast<size_t>(given.group()),
                          word_bytes,
                          chunks * sizeof(int32_t),
                          cuts ? lists * kBins * sizeof(uint64_t) : 0,
                          cuts ? chunks * kChunk * sizeof(uint16_t) : 0};
  size_t all = 0;
  for (const size_t size : sizes) all += rounded_up(size);
  auto* bytes = static_cast<char*>(context.workspace(all));
  if (bytes == nullptr) return Status::failure(StatusCode::out_of_memory, "no room to choose tokens in");
  size_t next = 0;
  auto take = [&, at = bytes]() mutable {
    char* const own = at;
    at += rounded_up(sizes[next++]);
    return own;
  };
  launch.memory.bins = reinterpret_cast<uint64_t*>(take());
  launch.memory.keys = reinterpret_cast<uint64_t*>(take());
  launch.memory.heads = reinterpret_cast<HeadState*>(take());
  launch.memory.lists = reinterpret_cast<ListState*>(take());
  launch.memory.head_words = reinterpret_cast<uint32_t*>(take());
  launch.memory.words = reinterpret_cast<uint32_t*>(take());
  launch.memory.chunk_counts = reinterpret_cast<int32_t*>(take());
  launch.memory.list_bins = reinterpret_cast<uint64_t*>(take());
  launch.memory.best_bins = reinterpret_cast<uint16_t*>(take());

  const auto run = [&](void (*kernel)(Launch), size_t blocks, int threads, int cluster = 1) {
    if (!status.ok()) return;
    status = launch_overlapped_clusters(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                                        static_cast<unsigned>(cluster), 0, stream_of(context), launch);
  };
  const size_t sums = heads * static_cast<size_t>(launch.sum_blocks);
  run(start, heads, kThreads);
  if (given.ranges == nullptr) run(find_range, sums, kSumThreads);
  run(sum_shares<false>, sums, kSumThreads);
  run(sum_shares<true>, sums, kSumThreads);
  run(mark_tokens, heads * static_cast<size_t>((launch.chunks + 1) / 2), kThreads);
  run(find_last_tokens, heads * static_cast<size_t>(launch.head_team), kThresholdThreads, launch.head_team);
  run(unite_heads, chunks, kThreads);
  if (cuts) {
    run(count_best, lists * static_cast<size_t>(launch.best_blocks), kSumThreads);
    run(mark_best, chunks, kThreads);
    run(find_last_best, lists * static_cast<size_t>(launch.list_team), kThresholdThreads, launch.list_team);
    run(sum_left, chunks, kThreads);
  }
  run(write_lists, chunks, kThreads);
  return status;
}

}  // namespace kv
