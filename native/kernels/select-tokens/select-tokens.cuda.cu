// Three launches: all multiprocessors score the blocks, a team of thread blocks chooses for each row, and a team
// writes the row's indices. A chosen block or single token is a set bit.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <algorithm>

#include "kernels/select-tokens/select-tokens-list.cuda.h"
#include "kernels/select-tokens/select-tokens.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/scores/small-scores.h"

namespace kv {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kScoreBlocks = 5;  // on a multiprocessor; bounds the registers that code for rare inputs may take
constexpr int kTokensOfScoreBlock = 2048;
constexpr int kTokensOfLane = 4;
constexpr int kTeam = 8;       // thread blocks
constexpr int kAlone = 16384;  // with so many candidates or fewer, one thread block is faster than a team

// Working memory. Each array is [row, …].
struct Memory {
  uint32_t* orders;        // [score_tokens]: orders of blocks, or of single tokens
  uint32_t* word_best;     // [words]: the greatest order of each 32 single tokens
  uint32_t* kept_blocks;   // [words]: a bit for each block
  uint32_t* round_blocks;  // [words]: a bit for each block of the current round
  uint32_t* kept_tokens;   // [words]: a bit for each single token
  uint64_t* best;          // [groups]: the best remaining block of each group
  uint32_t* best_orders;   // [groups]
  uint32_t* chosen_groups;  // [groups], only partly used: a bit for each group
  int words;
  int groups;
};

struct Launch {
  SelectTokensArguments arguments;
  Memory memory;
  FaultSink faults;
};

// The pooled score of token `here` of a prefix.
__device__ float pooled_score(const SelectTokensArguments& a, const float* scores, int prefix, int here) {
  const bool average = a.pooling == ScorePooling::average;
  const int first = max(0, here - a.pool_tokens / 2);
  const int last = min(prefix - 1, here + a.pool_tokens / 2);
  float pooled = average ? 0.0f : -INFINITY;
  for (int i = first; i <= last; ++i) pooled = average ? pooled + scores[i] : fmaxf(pooled, scores[i]);
  return pooled;
}

// The same, for a sum that may be too small for f32.
__device__ float small_pooled_score(const SelectTokensArguments& a, const float* scores, int prefix, int here) {
  const float pooled = pooled_score(a, scores, prefix, here);
  if (a.pooling != ScorePooling::average || !is_small(pooled)) return pooled;
  const int first = max(0, here - a.pool_tokens / 2);
  const int end = min(prefix, here + a.pool_tokens / 2 + 1);
  return small_mean([&](int i) { return scores[first + i]; }, end - first, 1, pooled);
}

// The score of the tokens first .. first + count - 1, some of whose scores are small.
__device__ float small_block_score(const SelectTokensArguments& a, const float* scores, int prefix, int first,
                                   int count) {
  const auto score = [&](int i) {
    return a.pooling == ScorePooling::none ? scores[first + i] : small_pooled_score(a, scores, prefix, first + i);
  };
  double sum = 0;
  KV_ROLLED
  for (int i = 0; i < count; ++i) sum += static_cast<double>(score(i));
  return is_small(sum) ? small_mean(score, count, count, sum) : static_cast<float>(sum / count);
}

// What is asked for a row, and the row's part of the memory. Positions count from the first token after the sinks.
struct Row {
  const SelectTokensArguments& arguments;
  Memory memory;
  const float* scores;
  int prefix;
  int window;
  int sinks;
  int tokens;  // to choose among
  int wanted;  // to choose
  int block_tokens;
  int blocks;
  bool valid;

  __device__ Row(const Launch& launch, int row) : arguments(launch.arguments), memory(launch.memory) {
    const SelectTokensRow& asked = arguments.rows[row];
    scores = arguments.scores + int64_t{row} * arguments.score_tokens;
    memory.orders += int64_t{row} * arguments.score_tokens;
    memory.word_best += int64_t{row} * memory.words;
    memory.kept_blocks += int64_t{row} * memory.words;
    memory.round_blocks += int64_t{row} * memory.words;
    memory.kept_tokens += int64_t{row} * memory.words;
    memory.best += int64_t{row} * memory.groups;
    memory.best_orders += int64_t{row} * memory.groups;
    memory.chosen_groups += int64_t{row} * memory.groups;
    prefix = asked.prefix_tokens;
    window = asked.window_tokens;
    const int64_t held = int64_t{prefix} + window;
    const int64_t kept = min(held, int64_t{max(asked.capacity, window)});
    valid = prefix >= 0 && prefix <= arguments.score_tokens && window >= 0 && asked.capacity >= 0 &&
            asked.block_tokens > 0 && held <= INT32_MAX && kept <= arguments.index_tokens;
    if (!valid) return;
    const int of_prefix = static_cast<int>(kept) - window;
    sinks = min(of_prefix, arguments.sink_tokens);
    tokens = prefix - sinks;
    wanted = of_prefix - sinks;
    block_tokens = max(1, min(asked.block_tokens, wanted));
    blocks = (tokens + block_tokens - 1) / block_tokens;
  }

  // Whether there is a choice: not if all tokens are kept or none.
  __device__ bool chooses() const { return valid && wanted > 0 && wanted < tokens; }
  __device__ int tokens_of(int block) const { return min(block_tokens, tokens - block * block_tokens); }

  template <bool kPooled>
  __device__ float score_of(int token) const {
    const int here = token + sinks;
    return kPooled ? pooled_score(arguments, scores, prefix, here) : scores[here];
  }
};

// An unsigned integer that is greater for a greater score and never 0. Both zeros give the same number; NaN gives
// that of minus infinity.
__device__ uint32_t order_of(float score) {
  const uint32_t bits = __float_as_uint(isnan(score) ? -INFINITY : score + 0.0f);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

__device__ bool is_set(const uint32_t* bits, int index) {
  return (read_word(bits, index / 32) >> index % 32 & 1) != 0;
}

constexpr uint32_t kOrderOfFirst = 0x80000001u;  // of the smallest score above 0

// ---- The scores of candidates ----

// Computes the orders of order_tokens again, with sums that may be too small for f32. The same warps must call it.
__device__ __noinline__ void order_small_tokens(Row row, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int word = warp; word * kWarp < row.tokens; word += warps) {
    const int token = word * kWarp + lane;
    uint32_t order = token < row.tokens ? row.memory.orders[token] : 0;
    if (order != 0) {
      order = order_of(small_pooled_score(row.arguments, row.scores, row.prefix, token + row.sinks));
      row.memory.orders[token] = order;
    }
    const uint32_t best = __reduce_max_sync(0xffffffffu, order);
    if (lane == 0) row.memory.word_best[word] = best;
  }
}

// Computes the orders of single tokens, 0 for those that is_free denies. `warps` warps share the tokens.
template <class IsFree>
__device__ void order_tokens(const Row& row, int warp, int warps, IsFree is_free) {
  constexpr int kBatch = 4;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool maximum = row.arguments.pooling == ScorePooling::maximum;
  const int reach = row.arguments.pooling == ScorePooling::none ? 0 : row.arguments.pool_tokens / 2;
  const float outside = maximum ? -INFINITY : 0.0f;
  uint32_t lowest = UINT32_MAX;  // least order of a score above 0, counted from kOrderOfFirst
  for (int first = warp; first * kWarp < row.tokens; first += warps * kBatch) {
    float pooled[kBatch];
#pragma unroll
    for (float& score : pooled) score = outside;
    for (int distance = -reach; distance <= reach; ++distance) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int from = (first + j * warps) * kWarp + lane + row.sinks + distance;
        const float score = from >= 0 && from < row.prefix ? row.scores[from] : outside;
        pooled[j] = maximum ? fmaxf(pooled[j], score) : pooled[j] + score;
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int word = first + j * warps;
      if (word * kWarp >= row.tokens) break;
      const int token = word * kWarp + lane;
      const uint32_t order = token < row.tokens && is_free(token) ? order_of(pooled[j]) : 0;
      if (token < row.tokens) row.memory.orders[token] = order;
      const uint32_t best = __reduce_max_sync(0xffffffffu, order);
      if (lane == 0) row.memory.word_best[word] = best;
      lowest = min(lowest, order - kOrderOfFirst);
    }
  }
  const bool small = lowest < order_of(kSmallScore) - kOrderOfFirst;
  if (reach == 0 || maximum || !__any_sync(0xffffffffu, small)) return;
  order_small_tokens(row, warp, warps);
}

// Computes orders of order_blocks again, with sums that may be too small for f32 or f64. There, `lanes` lanes share
// each block; here the warp divides the blocks among its lanes. `small` has the bits of the lanes whose blocks need
// it.
__device__ __noinline__ void order_small_blocks(Row row, int thread, int threads, int lanes, unsigned small) {
  const int groups = kWarp / lanes;
  const int lane = thread % kWarp;
  const int group = lane % groups;
  if ((small >> group * lanes & 1) == 0) return;
  const int step = threads / lanes;
  for (int block = (thread - lane) / lanes + group + lane / groups * step; block < row.blocks; block += threads) {
    const int first = block * row.block_tokens + row.sinks;
    const float score = small_block_score(row.arguments, row.scores, row.prefix, first, row.tokens_of(block));
    row.memory.orders[block] = order_of(score);
  }
}

template <bool kPooled>
__device__ void order_blocks(const Row& row, int thread, int threads) {
  // Neighbouring lanes share a block if it has enough tokens for them. Each lane works on several blocks.
  constexpr int kBatch = 4;
  int lanes = kWarp;
  while (lanes > 1 && lanes * kTokensOfLane > row.block_tokens) lanes /= 2;
  const int lane = thread % lanes;
  const int step = threads / lanes;
  bool small = false;
  for (int first = thread / lanes; first - first % (kWarp / lanes) < row.blocks; first += step * kBatch) {
    double sums[kBatch] = {};
#pragma unroll 4
    for (int i = lane; i < row.block_tokens; i += lanes) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int64_t token = int64_t{first + j * step} * row.block_tokens + i;
        const float score = row.score_of<kPooled>(static_cast<int>(min(token, int64_t{row.tokens - 1})));
        sums[j] += token < row.tokens ? static_cast<double>(score) : 0.0;
        if (kPooled) small |= is_small(score);
      }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int block = first + j * step;
      if (lane != 0 || block >= row.blocks) continue;
      row.memory.orders[block] = order_of(static_cast<float>(sums[j] / row.tokens_of(block)));
      small |= is_small(sums[j]);
    }
  }
  const unsigned small_lanes = __ballot_sync(0xffffffffu, small);
  if (small_lanes == 0) return;
  __syncwarp();  // the other lanes have written their orders
  order_small_blocks(row, thread, threads, lanes, kPooled ? 0xffffffffu : small_lanes);
}

template <bool kPooled>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks) order_candidates(const __grid_constant__ Launch launch) {
  const Row row(launch, static_cast<int>(blockIdx.y));
  if (!row.chooses()) return;
  const int thread = static_cast<int>(blockIdx.x * kScoreThreads + threadIdx.x);
  const int threads = static_cast<int>(gridDim.x) * kScoreThreads;
  for (int word = thread; word * 32 < row.tokens; word += threads) {
    row.memory.kept_blocks[word] = 0;
    row.memory.kept_tokens[word] = 0;
  }
  if (row.block_tokens == 1) {
    order_tokens(row, thread / kWarp, threads / kWarp, [](int) { return true; });
  } else {
    order_blocks<kPooled>(row, thread, threads);
  }
}

// ---- The choice ----

class Choice {
 public:
  __device__ Choice(const Row& row, const Team& team) : row_(row), team_(team) {}

  __device__ void choose_blocks() {
    const SelectTokensArguments& a = row_.arguments;
    const int quota = min(row_.wanted / row_.block_tokens, row_.blocks);
    round_ = a.overlapping_rounds ? row_.memory.round_blocks : row_.memory.kept_blocks;
    int carried = 0;
    for (int round = 0; round < a.round_count; ++round) {
      const int blocks = quota / a.round_count + (round < quota % a.round_count ? 1 : 0) + carried;
      if (blocks == 0) continue;
      if (a.overlapping_rounds) clear_round();
      const int left = choose_in_groups(min(a.rounds[round], row_.blocks), blocks);
      if (a.overlapping_rounds) {
        add_round();
      } else {
        carried = left;
      }
    }
  }

  // Keeps the best single tokens until enough are kept. Their orders overwrite those of the blocks.
  __device__ void fill(int missing) {
    order_tokens(row_, team_.thread() / kWarp, team_.threads() / kWarp,
                 [&](int token) { return !is_set(row_.memory.kept_blocks, token / row_.block_tokens); });
    team_.sync();
    const Candidates tokens = {row_.memory.orders, nullptr, row_.memory.word_best};
    take_best(team_, {0, 1, 1, row_.tokens}, missing, tokens, row_.memory.kept_tokens);
  }

 private:
  // The blocks to choose from. Blocks that this round has chosen are excluded, and without overlapping rounds those
  // of earlier rounds too.
  __device__ Candidates blocks() const {
    return {row_.memory.orders, round_, row_.block_tokens == 1 ? row_.memory.word_best : nullptr};
  }

  // Chooses `wanted` blocks. Returns how many it could not find.
  __device__ int choose_in_groups(int groups, int wanted) {
    int left = wanted;
    const int of_each = wanted / groups;
    for (int first = 0; of_each > 0 && first < groups; first += kRadixGroups) {
      const RadixGroups some = {first, min(kRadixGroups, groups - first), groups, row_.blocks};
      left -= take_best(team_, some, of_each, blocks(), round_);
    }
    if (left > 0 && groups > 1) left -= choose_one_of_each(groups, left);
    if (left > 0) left -= take_best(team_, {0, 1, 1, row_.blocks}, left, blocks(), round_);
    return left;
  }

  // Takes the best remaining block of each group, and chooses the best `wanted` of these. Returns how many it chose.
  __device__ int choose_one_of_each(int groups, int wanted) {
    auto* best = reinterpret_cast<unsigned long long*>(row_.memory.best);
    uint32_t* chosen = row_.memory.chosen_groups;
    for (int group = team_.thread(); group < groups; group += team_.threads()) {
      best[group] = 0;
      if (group % 32 == 0) chosen[group / 32] = 0;
    }
    team_.sync();
    for (int first = 0; first < groups; first += kRadixGroups) {
      const RadixShare some(team_, {first, min(kRadixGroups, groups - first), groups, row_.blocks});
      unsigned long long own = 0;
      some.for_each(blocks(), [&](int word, uint32_t order) {
        if (order == 0) return;
        own = max(own, static_cast<unsigned long long>(candidate(order, RadixShare::index_of(word), row_.blocks)));
      });
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        own = max(own, __shfl_xor_sync(0xffffffffu, own, distance));
      }
      if (own != 0 && threadIdx.x % kWarp == 0) atomicMax(best + first + some.group(), own);
    }
    team_.sync();
    for (int group = team_.thread(); group < groups; group += team_.threads()) {
      row_.memory.best_orders[group] = static_cast<uint32_t>(__ldcg(best + group) >> 32);
    }
    team_.sync();
    // Groups are in the order of their blocks, so ties between groups are decided like ties between blocks.
    const int taken = take_best(team_, {0, 1, 1, groups}, wanted, {row_.memory.best_orders, nullptr, nullptr}, chosen);
    for (int group = team_.thread(); group < groups; group += team_.threads()) {
      if (!is_set(chosen, group)) continue;
      const int index = index_of_candidate(__ldcg(best + group), row_.blocks);
      atomicOr(round_ + index / 32, 1u << index % 32);
    }
    team_.sync();
    return taken;
  }

  __device__ void clear_round() {
    for (int word = team_.thread(); word * 32 < row_.blocks; word += team_.threads()) round_[word] = 0;
    team_.sync();
  }
  __device__ void add_round() {
    for (int word = team_.thread(); word * 32 < row_.blocks; word += team_.threads()) {
      row_.memory.kept_blocks[word] = read_word(row_.memory.kept_blocks, word) | read_word(round_, word);
    }
    team_.sync();
  }

  const Row& row_;
  const Team team_;
  uint32_t* round_ = nullptr;
};

// The number of tokens in the chosen blocks, of which only the last block may be shorter. Every thread gets it.
__device__ int tokens_of_blocks(const Row& row) {
  using Reduce = cub::BlockReduce<int, kSelectThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ int sum;
  int blocks = 0;
  for (int word = static_cast<int>(threadIdx.x); word * 32 < row.blocks; word += kSelectThreads) {
    blocks += __popc(read_word(row.memory.kept_blocks, word));
  }
  blocks = Reduce(storage).Sum(blocks);
  if (threadIdx.x == 0) sum = blocks;
  __syncthreads();
  const int last = row.blocks - 1;
  const int missing = is_set(row.memory.kept_blocks, last) ? row.block_tokens - row.tokens_of(last) : 0;
  return sum * row.block_tokens - missing;
}

__global__ void __launch_bounds__(kSelectThreads) choose(const __grid_constant__ Launch launch, int cluster) {
  __shared__ uint32_t bits[2][kAlone / 32];
  Row row(launch, static_cast<int>(blockIdx.x) / cluster);
  if (!row.chooses()) return;
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const Team for_tokens = {rank, row.tokens > kAlone ? cluster : 1};
  const bool alone = row.blocks <= kAlone;
  uint32_t* const kept_blocks = row.memory.kept_blocks;
  if (alone) {
    // The bits of so few blocks fit into shared memory.
    row.memory.kept_blocks = bits[0];
    row.memory.round_blocks = bits[1];
    for (int word = static_cast<int>(threadIdx.x); word < kAlone / 32; word += kSelectThreads) bits[0][word] = 0;
    __syncthreads();
  }
  if (!alone || rank == 0) Choice(row, {rank, alone ? 1 : cluster}).choose_blocks();
  if (alone && rank == 0) {
    const int words = (row.blocks + 31) / 32;
    for (int word = static_cast<int>(threadIdx.x); word < words; word += kSelectThreads) {
      kept_blocks[word] = bits[0][word];
    }
  }
  row.memory.kept_blocks = kept_blocks;
  // If blocks are single tokens, blocks alone give all that is wanted, unless rounds overlap.
  if (!row.arguments.fill || (row.block_tokens == 1 && !row.arguments.overlapping_rounds)) return;
  if (rank >= for_tokens.ranks) return;
  for_tokens.sync();
  const int missing = row.wanted - tokens_of_blocks(row);
  if (missing > 0) Choice(row, for_tokens).fill(missing);
}

// ---- The indices ----

// A bit for each kept token of 32 * word .. 32 * word + 31.
__device__ uint32_t kept_word(const Row& row, int word) {
  const auto kept_block = [&](int block) { return row.memory.kept_blocks[block / 32] >> block % 32 & 1; };
  uint32_t kept = row.memory.kept_tokens[word];
  if (row.block_tokens == 1) return kept | row.memory.kept_blocks[word];
  const int begin = 32 * word;
  const int end = min(begin + 32, row.tokens);
  // A block may begin before `begin` or end after `end`. Its tokens outside the word are cut off.
  int block = begin / row.block_tokens;
  for (int token = block * row.block_tokens; token < end; token += row.block_tokens, ++block) {
    const uint32_t from = token > begin ? ~uint32_t{0} << (token - begin) : ~uint32_t{0};
    const int behind = min(token + row.block_tokens, end) - begin;
    const uint32_t upto = behind < 32 ? ~(~uint32_t{0} << behind) : ~uint32_t{0};
    kept |= kept_block(block) != 0 ? from & upto : 0;
  }
  return kept;
}

__global__ void __launch_bounds__(kSelectThreads) write_indices(const __grid_constant__ Launch launch, int cluster) {
  using Scan = cub::BlockScan<int, kSelectThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ uint4 total;  // x: how many indices this thread block writes
  const int index = static_cast<int>(blockIdx.x) / cluster;
  const Team team = {static_cast<int>(blockIdx.x) % cluster, cluster};
  const int thread = static_cast<int>(threadIdx.x);
  const SelectTokensArguments& a = launch.arguments;
  const Row row(launch, index);
  if (!row.valid) {
    if (team.thread() == 0) {
      a.counts[index] = 0;
      report_fault(launch.faults, SelectTokensFault::impossible_row, index, index, a.index_tokens);
    }
    return;
  }
  int32_t* indices = a.indices + int64_t{index} * a.index_tokens;
  int kept = row.wanted;
  if (row.chooses()) {
    // Each warp has consecutive words, which its lanes take in turn.
    constexpr int kBatch = 4;
    const int lane = thread % kWarp;
    const int words = (row.tokens + 31) / 32;
    const int of_warp = (words + team.threads() - 1) / team.threads() * kWarp;
    const int begin = team.thread() / kWarp * of_warp;
    const int end = min(begin + of_warp, words);
    const auto for_each_word = [&](auto body) {
      for (int first = begin; first < end; first += kBatch * kWarp) {
        uint32_t kept_words[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int word = first + i * kWarp + lane;
          const uint32_t kept_here = kept_word(row, min(word, words - 1));
          kept_words[i] = word < end ? kept_here : 0;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) body(first + i * kWarp + lane, kept_words[i]);
      }
    };
    int own = 0;
    for_each_word([&](int, uint32_t word) { own += __popc(word); });
    int before = 0;
    int sum = 0;
    Scan(storage).ExclusiveSum(own, before, sum);
    if (thread == 0) total.x = static_cast<uint32_t>(sum);
    team.sync();
    kept = 0;
    for (int rank = 0; rank < cluster; ++rank) {
      if (rank == team.rank) before += kept;
      kept += static_cast<int>(team.load(&total, rank).x);
    }
    team.sync();
    int32_t* to = indices + row.sinks + __shfl_sync(0xffffffffu, before, 0);
    for_each_word([&](int word, uint32_t left) {
      if (__ballot_sync(0xffffffffu, left != 0) == 0) return;
      const int count = __popc(left);
      int to_here = count;  // count of this lane's word and all earlier ones
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int earlier = __shfl_up_sync(0xffffffffu, to_here, distance);
        if (lane >= distance) to_here += earlier;
      }
      int32_t* place = to + to_here - count;
      for (; left != 0; left &= left - 1) *place++ = row.sinks + 32 * word + __ffs(static_cast<int>(left)) - 1;
      to += __shfl_sync(0xffffffffu, to_here, kWarp - 1);
    });
  }
  const int leading = row.sinks + (row.chooses() ? 0 : kept);
  for (int i = team.thread(); i < leading; i += team.threads()) indices[i] = i;
  for (int i = team.thread(); i < row.window; i += team.threads()) indices[row.sinks + kept + i] = row.prefix + i;
  if (team.thread() == 0) a.counts[index] = row.sinks + kept + row.window;
}

// ---- Launch ----

Status launch_teams(void (*kernel)(Launch, int), const Launch& launch, unsigned team, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {team, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(launch.arguments.row_count) * team, 1, 1};
  config.blockDim = {kSelectThreads, 1, 1};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = team > 1 ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, launch, static_cast<int>(team)));
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Status select_tokens_cuda(const SelectTokensArguments& a, ExecutionContext& context) {
  if (a.row_count == 0) return Status::success();
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;

  Launch launch{a, {}, context.faults(describe_select_tokens_fault)};
  Memory& memory = launch.memory;
  memory.words = (a.score_tokens + 31) / 32;
  memory.groups = std::min(*std::max_element(a.rounds, a.rounds + a.round_count), a.score_tokens);
  const auto rows = static_cast<size_t>(a.row_count);
  const size_t orders_bytes = rounded_up(rows * static_cast<size_t>(a.score_tokens) * sizeof(uint32_t));
  const size_t bits_bytes = rounded_up(rows * static_cast<size_t>(memory.words) * sizeof(uint32_t));
  const size_t groups = rows * static_cast<size_t>(memory.groups);
  const size_t best_bytes = groups * (sizeof(uint64_t) + 2 * sizeof(uint32_t));
  auto* bytes = static_cast<char*>(context.workspace(orders_bytes + 4 * bits_bytes + best_bytes));
  if (bytes == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for the scores of blocks");
  memory.orders = reinterpret_cast<uint32_t*>(bytes);
  memory.kept_blocks = reinterpret_cast<uint32_t*>(bytes + orders_bytes);
  memory.round_blocks = reinterpret_cast<uint32_t*>(bytes + orders_bytes + bits_bytes);
  memory.kept_tokens = reinterpret_cast<uint32_t*>(bytes + orders_bytes + 2 * bits_bytes);
  memory.word_best = reinterpret_cast<uint32_t*>(bytes + orders_bytes + 3 * bits_bytes);
  memory.best = reinterpret_cast<uint64_t*>(bytes + orders_bytes + 4 * bits_bytes);
  memory.best_orders = reinterpret_cast<uint32_t*>(memory.best + groups);
  memory.chosen_groups = memory.best_orders + groups;

  const int shares = std::max(1, (a.score_tokens + kTokensOfScoreBlock - 1) / kTokensOfScoreBlock);
  const dim3 score_grid(static_cast<unsigned>(shares), static_cast<unsigned>(a.row_count));
  const auto score = a.pooling == ScorePooling::none ? order_candidates<false> : order_candidates<true>;
  score<<<score_grid, kScoreThreads, 0, stream_of(context)>>>(launch);
  Status status = launch_status();
  const unsigned team = major >= 9 && a.score_tokens > kAlone ? kTeam : 1;
  if (status.ok()) status = launch_teams(choose, launch, team, stream_of(context));
  if (status.ok()) status = launch_teams(write_indices, launch, team, stream_of(context));
  return status;
}

}  // namespace kv
