// Choice of tokens on a CUDA device, in steps over all scores: the largest, sums of shares in bins, marks. Each head's
// last tokens are then found among those of one bin. Lists without room for all go through the same steps once more, by
// the largest share of each token.
#define KV_ISA cuda
#include "kernels/select-by-mass/select-by-mass-chunks.cuda.h"
#include "kernels/select-by-mass/select-by-mass-team.cuda.h"
#include "shared/cuda/arrivals.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/block-entry.h"
#include "shared/paged/check-tables.cuda.h"

namespace kv {
namespace {

// ---- Start ----

// A thread block for each row and query head clears what is counted there; the first of a kv head finds the row's slot.
__global__ void __launch_bounds__(kThreads) start(const __grid_constant__ Launch launch) {
  __shared__ int entry;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const int64_t row_head = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t* bins = launch.memory.bins + row_head * kShareBins;
  for (int bin = thread; bin < kShareBins; bin += kThreads) bins[bin] = 0;
  if (thread == 0) {
    launch.memory.heads[row_head] = HeadState{};
    entry = -1;
  }
  if (row_head % a.group() != 0) return;
  __syncthreads();
  const int64_t list = row_head / a.group();
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
  if (thread != 0) return;
  ListState state{-1, 0, {}};
  state.cut.bin = kShareBins;  // no list is cut yet
  if (!ascends) {
    report_fault(launch.faults, PagedFault::rows_not_ascending, 0, 0, a.query_tokens);
  } else if (!known) {
    report_fault(launch.faults, PagedFault::slot_out_of_range, a.slots[0], 0, a.slot_count);
  } else if (entry >= 0) {
    state.slot = a.slots[entry];
    state.tokens = a.key_counts[int64_t{state.slot} * a.kv_heads + list % a.kv_heads];
    if (state.tokens < 0 || state.tokens > int64_t{a.table_width} * kValueBlockTokens) {
      report_fault(launch.faults, PagedFault::cache_overflow, state.slot);
      state.tokens = 0;
    } else if (state.tokens > a.score_tokens) {
      report_fault(launch.faults, SelectByMassFault::too_many_keys, state.slot, row, a.score_tokens);
      state.tokens = 0;
    }
  }
  launch.memory.lists[list] = state;
}

// ---- Shares of each head ----

__global__ void __launch_bounds__(kThreads) find_largest(const __grid_constant__ Launch launch) {
  __shared__ uint32_t of_warps[kWarps];
  ptx::follow_previous_kernel();
  const HeadChunk chunk(launch, blockIdx.x, launch.chunks, kChunk);
  if (chunk.first >= chunk.end) return;
  float most = -INFINITY;
  bool odd = false;
  chunk.for_each_four(launch.aligned, [&](float4 own) {
    most = fmaxf(fmaxf(fmaxf(most, own.x), fmaxf(own.y, own.z)), own.w);
    odd = odd || isnan(own.x) || isnan(own.y) || isnan(own.z) || isnan(own.w);
  });
  const uint32_t order = __reduce_max_sync(0xffffffffu, odd ? UINT32_MAX : score_order(most));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = order;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const uint32_t all = __reduce_max_sync(0xffffffffu, threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0u);
  if (threadIdx.x == 0) atomicMax(&chunk.head.most_order, all);
}

// NaN for a head that takes no token because of what its scores or windows are.
__device__ float largest_of(const SelectByMassArguments& a, const HeadState& head, int64_t row_head) {
  const float dense = a.dense_log_sum_exp == nullptr ? -INFINITY : a.dense_log_sum_exp[row_head];
  if (!(dense < INFINITY) || head.most_order == UINT32_MAX) return NAN;
  return head.most_order == 0 ? -INFINITY : __uint_as_float(cuda::bits_of_order(head.most_order));
}

// A thread block counts shares in units of the octave of their bin, as far as these are not below the unit of all shares.
__device__ uint32_t bits_dropped(uint32_t factor) {
  return static_cast<uint32_t>(max(0, static_cast<int>(factor & 0xff) - cuda::kPlainBits));
}
__device__ int bits_added(uint32_t factor) { return max(0, cuda::kPlainBits - static_cast<int>(factor & 0xff)); }

__global__ void __launch_bounds__(kThreads) sum_shares(const __grid_constant__ Launch launch) {
  // Behind the bins of shares each lane has one for what counts as nothing, so that nothing is asked for each score.
  constexpr int kAllBins = kShareBins + kWarp;
  __shared__ uint32_t low[kAllBins];  // of a bin's sum the lower 32 bits, and the upper ones
  __shared__ uint32_t high[kAllBins];
  __shared__ uint32_t factors[kAllBins];
  __shared__ typename BinScan::Scan::TempStorage storage;
  __shared__ bool last;
  __shared__ uint64_t wanted;
  ptx::let_next_kernel_start();
  // Here the lower byte says how many bits are dropped.
  for (int bin = static_cast<int>(threadIdx.x); bin < kAllBins; bin += kThreads) {
    factors[bin] = bin < kShareBins ? (kFactors.of[bin] & ~0xffu) | bits_dropped(kFactors.of[bin]) : 0;
    low[bin] = high[bin] = 0;
  }
  ptx::wait_for_previous_kernel();
  __syncthreads();
  const HeadChunk chunk(launch, block_from_end(), launch.sum_chunks, kSumChunk);
  const SelectByMassArguments& a = launch.a;
  HeadState& head = chunk.head;
  HeadSum sum{largest_of(a, head, chunk.row_head), 0};
  const bool counts = sum.is_sound() && sum.most > -INFINITY;
  uint64_t* all_bins = launch.memory.bins + chunk.row_head * kShareBins;
  if (counts && chunk.first < chunk.end) {
    const int bin_of_nothing = kShareBins + static_cast<int>(threadIdx.x) % kWarp;
    chunk.for_each_four(launch.aligned, [&](float4 four) {
      const float own[] = {four.x, four.y, four.z, four.w};
      int bin[4];
      uint32_t bits[4];
      bool carries = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float below = sum.most - own[i];
        const uint32_t fixed = cuda::fixed_below(below);
        bin[i] = below < kNoShareBelow ? cuda::bin_of(fixed) : bin_of_nothing;
        const uint32_t factor = factors[bin[i]];
        bits[i] = __funnelshift_r(cuda::share_bits(fixed, factor), 0, factor);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t before = atomicAdd(&low[bin[i]], bits[i]);
        bits[i] = before > ~bits[i] ? 1 : 0;
        carries = carries || bits[i] != 0;
      }
      if (!carries) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (bits[i] != 0) atomicAdd(&high[bin[i]], 1u);
      }
    });
    __syncthreads();
    for (int bin = static_cast<int>(threadIdx.x); bin < kShareBins; bin += kThreads) {
      const uint64_t own = uint64_t{high[bin]} << 32 | low[bin];
      if (own == 0) continue;
      atomicAdd(reinterpret_cast<unsigned long long*>(all_bins + bin), own << bits_added(kFactors.of[bin]));
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) last = arrives_last(head.cut.arrivals, static_cast<unsigned>(launch.sum_chunks));
  __syncthreads();
  if (!last) return;
  const BinScan scan(all_bins, storage);
  if (threadIdx.x == 0) {
    sum.total = scan.all();
    head.sum = sum;
    head.cut.bin = -1;
    wanted = 0;
    if (sum.total > 0) {
      const float dense = a.dense_log_sum_exp == nullptr ? -INFINITY : a.dense_log_sum_exp[chunk.row_head];
      wanted = cuda::wanted_share(sum, dense, a.tau);
      head.log_of_all = cuda::log_of_all(sum, dense);
    }
  }
  __syncthreads();
  if (wanted > 0) scan.find(wanted, head.cut);
}

// ---- Marks ----

// Lists the candidates of a warp, one bit of `lanes` each. Returns where this lane's is; the warp's lanes all call it.
__device__ unsigned places_for(unsigned& found, int count) {
  unsigned before = 0;
  if (threadIdx.x % kWarp == 0) before = atomicAdd(&found, static_cast<unsigned>(count));
  return __shfl_sync(0xffffffffu, before, 0);
}

// A thread block has a chunk of a list, and each warp some words of it. It marks what each head takes because it is above
// the head's bin, and lists what is in the bin.
__global__ void __launch_bounds__(kThreads) mark_tokens(const __grid_constant__ Launch launch) {
  constexpr int kBatch = 8;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const List list(launch, blockIdx.x / launch.chunks);
  const int chunk = static_cast<int>(blockIdx.x % launch.chunks);
  const int tokens = list.state.tokens;
  if (chunk * kChunk >= tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first_word = chunk * kChunkWords + static_cast<int>(threadIdx.x) / kWarp * (kChunkWords / kWarps);
  uint32_t full_heads = 0;  // of the first 32, those with more candidates than are listed
#pragma unroll 1
  for (int word = first_word; word < first_word + kChunkWords / kWarps; word += kBatch) {
    for (int h = 0; h < a.group(); ++h) {
      HeadState& head = list.heads[h];
      const float most = head.sum.most;
      const float above = static_cast<float>(head.cut.bin) / 64;  // of `below`, as bins are
      const float* scores = list.scores + int64_t{h} * a.score_tokens;
      float own[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int token = (word + i) * kWarp + lane;
        own[i] = token < tokens ? scores[token] : -INFINITY;
      }
      uint32_t in_bin[kBatch];
      uint32_t own_marks = 0;
      int found = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float below = most - own[i];
        const bool is_above = below < above;
        const uint32_t marks = __ballot_sync(0xffffffffu, is_above);
        if (lane == i) own_marks = marks;
        in_bin[i] = __ballot_sync(0xffffffffu, !is_above && below < above + 1.0f / 64);
        found += __popc(in_bin[i]);
      }
      if (lane < kBatch) list.head_words(h)[word + lane] = own_marks;
      if (found == 0) continue;
      const bool full = h < 32 && (full_heads >> h & 1) != 0;
      unsigned place = full ? kListed : places_for(head.cut.found, found);
      if (place + found > kListed) {
        if (h < 32) full_heads |= 1u << h;
        OrderRange range{};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if ((in_bin[i] >> lane & 1) != 0) range.add(score_order(own[i]));
        }
        head.cut.range.include(range);
      }
      uint64_t* keys = launch.memory.keys + (list.index * a.group() + h) * kListed;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned own_place = place + __popc(in_bin[i] & ((1u << lane) - 1));
        if ((in_bin[i] >> lane & 1) != 0 && own_place < kListed) {
          keys[own_place] = candidate_key(score_order(own[i]), (word + i) * kWarp + lane);
        }
        place += __popc(in_bin[i]);
      }
    }
  }
}

// Adds the sum over a warp to the share of a head's tokens.
__device__ void add_taken(HeadState& head, uint64_t own) {
  own = warp_sum(own);
  if (threadIdx.x % kWarp == 0 && own != 0) atomicAdd(&head.taken, static_cast<unsigned long long>(own));
}

// Lists what is left of a search. Each lane has eight keys.
__device__ void list_rest(const TeamThreshold::Rest& rest, const BatchOfKeys& keys, unsigned& found, uint64_t* listed) {
#pragma unroll
  for (int i = 0; i < kKeyBatch * kOfLane; ++i) {
    const uint64_t key = keys[i / kOfLane][i % kOfLane];
    if (rest.wanted > 0 && rest.has(key)) listed[atomicAdd(&found, 1u)] = key;
  }
}

// Thread blocks for each row and query head find its last token, and mark what it takes of its bin. One is enough where
// the bin's candidates are listed.
__global__ void __launch_bounds__(kThresholdThreads, 1) find_last_tokens(const __grid_constant__ Launch launch) {
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
    const auto for_each = [&](auto body) {
      for_each_key(keys, found, [&](uint64_t key) { body(key, share_below(head.sum.most - score_of_key(key))); });
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

// Counts the tokens of a list in a chunk, of which each warp has found some.
__device__ void count_marks(const List& list, int chunk, int of_warp) {
  __shared__ int counts[kWarps];
  if (threadIdx.x % kWarp == 0) counts[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int all = 0;
  for (int warp = 0; warp < kWarps; ++warp) all += counts[warp];
  list.chunk_counts()[chunk] = all;
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

// Writes the order of the largest share of each marked token, if the list has no room for all. `cut.bin` of the list
// stays kShareBins if it has.
__global__ void __launch_bounds__(kThreads) measure_best(const __grid_constant__ Launch launch) {
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const List list(launch, blockIdx.x / launch.chunks);
  const int chunk = static_cast<int>(blockIdx.x % launch.chunks);
  const int thread = static_cast<int>(threadIdx.x);
  const int tokens = list.state.tokens;
  if (chunk * kChunk >= tokens) return;
  if (ChunkSums(list, chunk).all <= a.most_tokens()) return;
  if (chunk == 0) {
    if (thread == 0) list.state.cut.bin = 0;
    for (int h = thread; h < a.group(); h += kThreads) list.heads[h].taken = 0;
  }
  OrderRange range{};
  for (int token = chunk * kChunk + kOfLane * thread; token < min((chunk + 1) * kChunk, tokens); token += kOfLane * kThreads) {
    uint32_t best[kOfLane] = {};
#pragma unroll 4
    for (int h = 0; h < a.group(); ++h) {
      const uint32_t marks = __ldcg(list.head_words(h) + token / kWarp) >> token % kWarp;
      const float4 four = four_scores(list.scores + int64_t{h} * a.score_tokens, token, tokens, launch.aligned);
      const float own[kOfLane] = {four.x, four.y, four.z, four.w};
      const float log_of_all = list.heads[h].log_of_all;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        if ((marks >> i & 1) != 0) best[i] = max(best[i], score_order(own[i] - log_of_all));
      }
    }
    *reinterpret_cast<uint4*>(list.best() + token) = make_uint4(best[0], best[1], best[2], best[3]);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (best[i] != 0) range.add(best[i]);
    }
  }
  list.state.cut.range.include(range);
}

// Thread blocks for each list find the last token that there is room for, and leave only what is not behind it.
__global__ void __launch_bounds__(kThresholdThreads, 1) find_last_best(const __grid_constant__ Launch launch) {
  __shared__ KeyThreshold::Shared shared;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const List list(launch, blockIdx.x / launch.list_team);
  Cut& cut = list.state.cut;
  if (cut.bin == kShareBins) return;
  const int tokens = list.state.tokens;
  const Team team(launch.list_team);
  auto& memory = *reinterpret_cast<TeamMemory*>(list.keys_of_list());
  TeamThreshold::clear(team, memory, 0);
  team.for_each((tokens + kChunk - 1) / kChunk, [&](int chunk) { list.chunk_counts()[chunk] = 0; });
  team.meet();
  const ListCandidates candidates{list.best()};
  const auto rest = TeamThreshold::find(static_cast<uint64_t>(a.most_tokens()), team, candidates, tokens, cut.range, memory, shared);
  team.for_each_key(candidates, 0, tokens, [&](int token, const BatchOfKeys& batch) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kKeyBatch; ++i) {
      uint32_t bits = 0;
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) bits |= rest.takes(batch[i][j]) ? 1u << j : 0;
      const int word = token / kWarp + i * kOfLane;
      const uint32_t marks = word_of(bits);
      if (threadIdx.x % 8 == 0 && word * kWarp < tokens) list.words()[word] = marks;
      count += __popc(bits);
    }
    count = __reduce_add_sync(0xffffffffu, count);
    if (count > 0 && threadIdx.x % kWarp == 0) atomicAdd(list.chunk_counts() + token / kChunk, count);
    list_rest(rest, batch, cut.rest, memory.left);
  });
  team.meet();
  if (team.member() > 0 || rest.wanted == 0) return;
  const auto for_each = [&](auto body) {
    for_each_key(memory.left, static_cast<int>(__ldcg(&cut.rest)), [&](uint64_t key) { body(key, uint64_t{1}); });
  };
  const uint64_t threshold = KeyThreshold::find(rest.wanted, shared, for_each);
  for_each([&](uint64_t key, uint64_t) {
    const int token = token_of(key);
    if (key < threshold) return;
    atomicOr(list.words() + token / kWarp, 1u << token % kWarp);
    atomicAdd(list.chunk_counts() + token / kChunk, 1);
  });
}

// Adds up what share the tokens have that are left of a list that was cut. A thread block has a chunk.
__global__ void __launch_bounds__(kThreads) sum_left(const __grid_constant__ Launch launch) {
  __shared__ ChunkTokens tokens;
  __shared__ bool last;
  ptx::follow_previous_kernel();
  const SelectByMassArguments& a = launch.a;
  const List list(launch, blockIdx.x / launch.chunks);
  const int chunk = static_cast<int>(blockIdx.x % launch.chunks);
  if (chunk * kChunk >= list.state.tokens || list.state.cut.bin == kShareBins) return;
  const int count = tokens.find(list, chunk);
  for (int h = 0; h < a.group(); ++h) {
    uint64_t own = 0;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) own += list.taken_share(h, tokens.token(chunk, i));
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
  for (int i = thread; i < count; i += kThreads) a.value_rows[first + i] = value_row(tokens.token(chunk, i));
  if (a.weights == nullptr) return;
  for (int at = thread; at < count * group; at += kThreads) {
    const int token = tokens.token(chunk, at / group);
    const float weight = list.heads[at % group].made.weight(list.taken_share(at % group, token));
    a.weights[first * group + at] = a.value_scales == nullptr ? weight : weight * scale(value_row(token));
  }
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Status select_by_mass_cuda(const SelectByMassArguments& given, ExecutionContext& context) {
  const size_t rows = static_cast<size_t>(given.query_tokens);
  if (rows == 0) return Status::success();
  Launch launch{given, {}, context.faults(describe_select_by_mass_fault), 0, 0, 0, 0, false};
  const auto chunks_of = [&](int tokens) { return std::max(1, (given.score_tokens + tokens - 1) / tokens); };
  launch.chunks = chunks_of(kChunk);
  launch.sum_chunks = chunks_of(kSumChunk);
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
  launch.head_team = members(heads);
  launch.list_team = members(lists);
  const size_t word_bytes = chunks * kChunkWords * sizeof(uint32_t);
  const size_t sizes[] = {heads * kShareBins * sizeof(uint64_t),
                          heads * kListed * sizeof(uint64_t),
                          heads * sizeof(HeadState),
                          lists * sizeof(ListState),
                          word_bytes * static_cast<size_t>(given.group()),
                          word_bytes,
                          chunks * sizeof(int32_t),
                          given.score_tokens > given.most_tokens() ? chunks * kChunk * sizeof(uint32_t) : 0};
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
  launch.memory.best = reinterpret_cast<uint32_t*>(take());

  const auto run = [&](void (*kernel)(Launch), size_t blocks, int threads, int cluster = 1) {
    if (!status.ok()) return;
    status = launch_overlapped_clusters(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                                        static_cast<unsigned>(cluster), 0, stream_of(context), launch);
  };
  run(start, heads, kThreads);
  run(find_largest, heads * static_cast<size_t>(launch.chunks), kThreads);
  run(sum_shares, heads * static_cast<size_t>(launch.sum_chunks), kThreads);
  run(mark_tokens, chunks, kThreads);
  run(find_last_tokens, heads * static_cast<size_t>(launch.head_team), kThresholdThreads, launch.head_team);
  run(unite_heads, chunks, kThreads);
  if (given.score_tokens > given.most_tokens()) {
    run(measure_best, chunks, kThreads);
    run(find_last_best, lists * static_cast<size_t>(launch.list_team), kThresholdThreads, launch.list_team);
    run(sum_left, chunks, kThreads);
  }
  run(write_lists, chunks, kThreads);
  return status;
}

}  // namespace kv
