// Observation scores for Hopper. The queries of all heads that read a kv head are the rows of one matrix, up to kRows
// at a time, so that a key is read once for all of them. There are two passes over the keys. They go tile by tile,
// through a ring of stages that one producer warp fills:
//   1. S = Q K^T. Every row gets its maximum and sum. Thread blocks share the keys.
//   2. S^T = K Q^T. A thread now holds whole keys, and adds up the weights of their rows in registers.
// The second pass begins with the last keys of the first pass, which are still in L2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "kernels/observation-scores/observation-scores-head.cuda.h"
#include "kernels/observation-scores/observation-scores-sums.cuda.h"
#include "ptx/named-barrier.cuda.h"
#include "runtime/check.cuda.h"
#include "shared/attention/hopper/pool-map.cuda.h"
#include "shared/attention/hopper/tiles.cuda.h"
#include "shared/attention/hopper/warp-roles.cuda.h"
#include "shared/cuda/stage-ring.cuda.h"

namespace kv::sm90a {
namespace {

using Roles = WarpRoles<2>;  // each consumer thread holds two tiles of scores
constexpr int kConsumerThreads = 2 * kWarpgroupThreads;  // the first threads; the last warpgroup is the producer's
constexpr int kConsumersMeet = 1;  // id of a named barrier
constexpr int kRows = 128;
constexpr int kKeyTile = 128;
constexpr int kTileScores = 64;  // of each thread

template <typename ElementType, int kDim>
struct Shape {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kStages = 768 / kDim;
};

template <typename Shape>
struct alignas(1024) SharedStorage {
  using Tile = PanelTile<typename Shape::Element, kKeyTile, Shape::kHeadDim>;
  Tile query;
  Tile keys[Shape::kStages];
  alignas(8) float log_sums[kRows];
  StageRing<Shape::kStages> ring;
};

struct Parameters {
  ObservationScoresArguments arguments;
  ObservationScoresLaunch launch;
  int box_tokens;    // tokens of one copy; divides block_tokens and the key tile
  CUtensorMap keys;  // [block, block_token, dim]
};

// The rows of a kv head: query head after query head, each padded to whole columns of wgmma. A chunk of rows holds
// whole heads. If a head has more queries than a chunk has rows, the chunk holds a part of it.
struct Rows {
  int head_rows;
  int chunk_rows;
  int count;

  __device__ Rows(const ObservationScoresArguments& a, const ObservedHead& head) {
    head_rows = max(1, (head.queries + 7) / 8) * 8;
    chunk_rows = head_rows <= kRows ? kRows / head_rows * head_rows : kRows;
    count = a.query_heads / a.kv_heads * head_rows;
  }
  __device__ int chunks() const { return (count + chunk_rows - 1) / chunk_rows; }
};

enum class Pass { statistics, weights };

// ---- The producer: one warp. Of the boxes of all tiles in their order, a lane looks up and copies every 32nd. ----

template <typename Shape>
class Producer {
 public:
  __device__ Producer(const Parameters& parameters, SharedStorage<Shape>& shared, const ObservedHead& head, Pass pass,
                      PartOf tiles)
      : parameters_(parameters),
        batch_(parameters.arguments),
        shared_(shared),
        head_(head),
        pass_(pass),
        tiles_(tiles),
        lane_(threadIdx.x % 32),
        boxes_(kKeyTile / parameters.box_tokens) {}

  __device__ void run() {
    const int chunks = Rows(parameters_.arguments, head_).chunks();
    const int turn_tiles = 32 / boxes_;
    const int count = tiles_.end - tiles_.begin;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      Box box = find(0);
      for (int first = 0; first < count; first += turn_tiles) {
        const Box next = find(first + turn_tiles);
        for (int i = first; i < min(first + turn_tiles, count); ++i) copy(box, lane_ / boxes_ == i - first);
        box = next;
      }
    }
  }

 private:
  struct Box {
    int token;  // index in the block
    int block;  // negative after the last key
  };

  // Finds this lane's box among the boxes of the tiles from `first` on.
  __device__ Box find(int first) const {
    const int i = first + lane_ / boxes_;
    const int tile = pass_ == Pass::statistics ? tiles_.begin + i : tiles_.end - 1 - i;
    const int token = tile * kKeyTile + lane_ % boxes_ * parameters_.box_tokens;
    const int key_count = pass_ == Pass::statistics ? head_.seen_keys : head_.prefix;
    const bool present = i < tiles_.end - tiles_.begin && token < key_count;
    const int entry = token / batch_.block_tokens;
    return {token - entry * batch_.block_tokens, present ? head_.blocks[entry] : -1};
  }

  // Copies a tile to the next stage. `mine` says that this lane has one of its boxes.
  __device__ void copy(const Box& box, bool mine) {
    shared_.ring.wait_empty(at_);
    uint64_t* full = &shared_.ring.full[at_.stage];
    const bool present = mine && box.block >= 0;
    const int boxes = __popc(__ballot_sync(0xffffffffu, present));
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect_bytes(full, boxes * parameters_.box_tokens * Shape::kPanels * kPanelBytes);
    }
    __syncwarp();
    if (present) {
      copy_box(shared_.keys[at_.stage], lane_ % boxes_ * parameters_.box_tokens, &parameters_.keys, box.token,
               box.block, full);
    }
    at_.advance();
  }

  const Parameters& parameters_;
  const PagedBatch& batch_;
  SharedStorage<Shape>& shared_;
  const ObservedHead& head_;
  const Pass pass_;
  const PartOf tiles_;
  const int lane_;
  const int boxes_;  // of each tile
  RingPosition<Shape::kStages> at_;
};

// ---- Consumers: two warpgroups. ----

template <typename Shape>
class Consumer {
 public:
  using Element = typename Shape::Element;

  __device__ Consumer(const Parameters& parameters, SharedStorage<Shape>& shared, const ObservedHead& head)
      : parameters_(parameters),
        a_(parameters.arguments),
        shared_(shared),
        head_(head),
        rows_(a_, head),
        warpgroup_(threadIdx.x / kWarpgroupThreads),
        row_(threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4) {}

  // First pass: the statistics of every row over these tiles of keys.
  __device__ void gather_statistics(PartOf tiles) {
    for (int chunk = 0; chunk < rows_.chunks(); ++chunk) {
      load_queries(chunk);
      int visible[2];
      int fewest_visible = head_.seen_keys;
      for (int half = 0; half < 2; ++half) {
        const int row = row_of_chunk(chunk, row_in_tile(half));
        visible[half] = row >= 0 ? head_.visible(row % rows_.head_rows) : 0;
        if (row >= 0) fewest_visible = min(fewest_visible, visible[half]);
      }
      RowSums sums(a_.scale);
      for_each_tile<Pass::statistics>(tiles.end - tiles.begin, [&](int i, float(&scores)[kTileScores]) {
        const int tile = tiles.begin + i;
        if ((tile + 1) * kKeyTile > fewest_visible) mask(tile, visible, scores);
        sums.add(scores);
      });
      for (int half = 0; half < 2; ++half) {
        const RowStatistics statistics = sums.statistics(half);
        const int row = row_of_chunk(chunk, row_in_tile(half));
        if (row < 0 || threadIdx.x % 4 != 0) continue;
        statistics_of(a_, parameters_.launch, static_cast<int>(blockIdx.x), query_head(row), token(row)) = statistics;
      }
    }
  }

  // Second pass: the scores of the keys of these tiles.
  template <bool kMaximum>
  __device__ void add_up_weights(PartOf tiles) {
    const int heads = a_.reduction == GroupReduction::mean ? a_.query_heads / a_.kv_heads : 1;
    const float share = 1.0f / static_cast<float>(heads);
    for (int chunk = 0; chunk < rows_.chunks(); ++chunk) {
      load_queries(chunk);
      load_log_sums(chunk);
      for_each_tile<Pass::weights>(tiles.end - tiles.begin, [&](int i, float(&scores)[kTileScores]) {
        const int first_key = (tiles.end - 1 - i) * kKeyTile + row_in_tile(0);
        const Weighing by = {shared_.log_sums, a_.scale * kLog2E, rows_.head_rows};
        float weights[2];
        reduce_weights<kMaximum>(by, scores, weights);
        for (float& weight : weights) weight *= share;
        const bool small = weights[0] < kSmallScore || weights[1] < kSmallScore;
        if (!__any_sync(0xffffffffu, small)) {
          write_scores<kMaximum, false>(chunk, first_key, weights);
        } else {
          const float2 others = small_weights<kMaximum>(by, share, scores, std::make_index_sequence<kTileScores>());
          if (weights[0] < kSmallScore) weights[0] = others.x;
          if (weights[1] < kSmallScore) weights[1] = others.y;
          write_scores<kMaximum, true>(chunk, first_key, weights);
        }
      });
    }
  }

 private:
  // The rows of the left operand that this thread holds.
  __device__ int row_in_tile(int half) const { return warpgroup_ * kWarpgroupRows + row_ + 8 * half; }

  // The row of the kv head that a chunk's row is. Negative for padding.
  __device__ int row_of_chunk(int chunk, int row_in_chunk) const {
    const int row = chunk * rows_.chunk_rows + row_in_chunk;
    const bool present =
        row_in_chunk < rows_.chunk_rows && row < rows_.count && row % rows_.head_rows < head_.queries;
    return present ? row : -1;
  }
  __device__ int query_head(int row) const {
    return head_.kv_head * (a_.query_heads / a_.kv_heads) + row / rows_.head_rows;
  }
  __device__ int token(int row) const { return head_.first_token + row % rows_.head_rows; }

  static __device__ void meet() { ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads); }

  // Rows that do not exist become zeros.
  __device__ void load_queries(int chunk) {
    constexpr int kPieces = Shape::kHeadDim / 8;  // of 16 bytes
    constexpr int kLoads = kRows * kPieces / kConsumerThreads;
    constexpr int kRowsAtOnce = kConsumerThreads / kPieces;
    const int piece = threadIdx.x % kPieces;
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = row_of_chunk(chunk, i * kRowsAtOnce + threadIdx.x / kPieces);
      const Element* from = static_cast<const Element*>(a_.query) + token(max(row, 0)) * a_.query_token_stride +
                            query_head(max(row, 0)) * a_.query_head_stride;
      values[i] = row >= 0 ? *reinterpret_cast<const uint4*>(from + piece * 8) : make_uint4(0, 0, 0, 0);
    }
    meet();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = i * kRowsAtOnce + threadIdx.x / kPieces;
      *reinterpret_cast<uint4*>(shared_.query[piece / 8][row] + (piece % 8 ^ row % 8) * 8) = values[i];
    }
    ptx::fence_async_proxy();
    meet();
  }

  __device__ void load_log_sums(int chunk) {
    if (threadIdx.x < kRows) {
      // Infinity makes every weight of such a row 0.
      const int row = row_of_chunk(chunk, threadIdx.x);
      shared_.log_sums[threadIdx.x] =
          row < 0 ? INFINITY : log_sum_of(a_, parameters_.launch, query_head(row), token(row));
    }
    meet();
  }

  // Calls use(i, scores) for every tile i of keys, in the order in which the tiles arrive. The products of the next
  // tile run during each call.
  template <Pass kPass, class Use>
  __device__ void for_each_tile(int count, Use use) {
    if (count == 0) return;
    float even[kTileScores];
    float odd[kTileScores];
    start_products<kPass>(even);
    int i = 0;
    for (; i + 2 < count; i += 2) {
      start_products<kPass>(odd);
      finish_products<1>(even);
      use(i, even);
      start_products<kPass>(even);
      finish_products<1>(odd);
      use(i + 1, odd);
    }
    if (i + 2 == count) {
      start_products<kPass>(odd);
      finish_products<1>(even);
      use(i, even);
      finish_products<0>(odd);
      use(i + 1, odd);
    } else {
      finish_products<0>(even);
      use(i, even);
    }
  }

  // Waits for the next tile of keys and starts its products. These are this warpgroup's 64 queries times the tile's
  // keys, or 64 of the tile's keys times all queries.
  template <Pass kPass>
  __device__ void start_products(float (&scores)[kTileScores]) {
    const auto& query = shared_.query;
    const auto& keys = shared_.keys[next_.stage];
    const ScoreProducts products(kPass == Pass::statistics ? query : keys, warpgroup_ * kWarpgroupRows,
                                 kPass == Pass::statistics ? keys : query);
    shared_.ring.wait_full(next_);
    ptx::wgmma_fence();
    products.issue(scores);
    next_.advance();
  }

  // `kRunning` tiles have been started after this one.
  template <int kRunning>
  __device__ void finish_products(float (&scores)[kTileScores]) {
    ptx::wgmma_wait<kRunning>();
    ptx::pin_registers(scores);
    shared_.ring.release(finished_);
    finished_.advance();
  }

  __device__ void mask(int tile, const int (&visible)[2], float (&scores)[kTileScores]) const {
    const int first_key = tile * kKeyTile + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kTileScores; ++i) {
      if (first_key + 8 * (i / 4) + i % 2 >= visible[i / 2 % 2]) scores[i] = -INFINITY;
    }
  }

  // How scores become weights, for the rows of a chunk.
  struct Weighing {
    const float* log_sums;
    float scale_log2;
    int head_rows;
  };

  // Reduces the weights of two keys over all rows of the chunk. The threads of a quad hold their scores. If kScaled,
  // the results are divided by 2^exponents.
  template <bool kMaximum, bool kScaled = false>
  static __device__ void reduce_weights(const Weighing& by, const float (&scores)[kTileScores], float (&result)[2],
                                        const float (&exponents)[2] = {}) {
    float sums[2][2] = {};  // two chains, so that additions do not wait for each other
    float best[2] = {};
    int columns_left = by.head_rows;
#pragma unroll
    for (int i = 0; i < kTileScores; i += 4) {
      const auto log_sums = *reinterpret_cast<const float2*>(&by.log_sums[2 * i + 2 * (threadIdx.x % 4)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = kScaled ? exponents[half] : 0.0f;
        sums[half][0] += ptx::exp2_approximate(fmaf(scores[i + 2 * half], by.scale_log2, -log_sums.x) - offset);
        sums[half][1] += ptx::exp2_approximate(fmaf(scores[i + 2 * half + 1], by.scale_log2, -log_sums.y) - offset);
      }
      if constexpr (kMaximum) {
        columns_left -= 8;
        if (columns_left > 0) continue;
        columns_left = by.head_rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          best[half] = fmaxf(best[half], quad_sum(sums[half][0] + sums[half][1]));
          sums[half][0] = sums[half][1] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      result[half] = kMaximum ? best[half] : quad_sum(sums[half][0] + sums[half][1]);
    }
  }

  // The scores of the same two keys if they are small, computed from the logarithms of weights. Few tiles have such
  // keys, and the loop over tiles is faster without this code. The scores are passed one by one, because an array
  // would not be passed in registers.
  template <bool kMaximum, size_t... kIndex>
  static __device__ float2 small_weights(const Weighing& by, float share, const float (&scores)[kTileScores],
                                         std::index_sequence<kIndex...>) {
    return small_weights_of<kMaximum>(by.log_sums, by.scale_log2, by.head_rows, share, scores[kIndex]...);
  }

  template <bool kMaximum, class... Score>
  static __device__ __noinline__ float2 small_weights_of(const float* log_sums, float scale_log2, int head_rows,
                                                         float share, Score... score) {
    const Weighing by = {log_sums, scale_log2, head_rows};
    const float scores[kTileScores] = {score...};
    float exponents[2] = {-2e9f, -2e9f};
#pragma unroll
    for (int i = 0; i < kTileScores; ++i) {
      const float log_sum = by.log_sums[2 * (i / 4 * 4) + 2 * (threadIdx.x % 4) + i % 2];
      exponents[i / 2 % 2] = fmaxf(exponents[i / 2 % 2], fmaf(scores[i], by.scale_log2, -log_sum));
    }
#pragma unroll
    for (float& exponent : exponents) {
      exponent = fmaxf(exponent, __shfl_xor_sync(0xffffffffu, exponent, 1));
      exponent = floorf(fmaxf(exponent, __shfl_xor_sync(0xffffffffu, exponent, 2)));
    }
    float sums[2];
    reduce_weights<kMaximum, true>(by, scores, sums, exponents);
    return make_float2(score_of(sums[0] * share, static_cast<int>(exponents[0])),
                       score_of(sums[1] * share, static_cast<int>(exponents[1])));
  }

  // Writes the scores of both keys, combined with those of earlier chunks. If kSmall, some are small.
  template <bool kMaximum, bool kSmall>
  __device__ void write_scores(int chunk, int first_key, const float (&weights)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + 8 * half;
      if (threadIdx.x % 4 != 0 || key >= min(head_.prefix, a_.score_tokens)) continue;
      float score = weights[half];
      if (chunk > 0) {
        const float before = head_.scores[key];
        score = kMaximum ? fmaxf(before, score) : kSmall ? sum_of(before, score) : before + score;
      }
      head_.scores[key] = score;
    }
  }

  // The sum of two scores, of which some are small.
  static __device__ __noinline__ float sum_of(float a, float b) {
    const float sum = a + b;
    return is_small(sum) ? small_mean([&](int i) { return i == 0 ? a : b; }, 2, 1, sum) : sum;
  }

  static __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }

  static constexpr float kLog2E = 1.44269504f;

  const Parameters& parameters_;
  const ObservationScoresArguments& a_;
  SharedStorage<Shape>& shared_;
  const ObservedHead& head_;
  const Rows rows_;
  const int warpgroup_;
  const int row_;
  RingPosition<Shape::kStages> next_;
  RingPosition<Shape::kStages> finished_;
};

template <typename Shape>
__device__ SharedStorage<Shape>& shared_storage() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.ring.init(kConsumerThreads / 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  return shared;
}

__device__ int tiles_of(int keys) { return (keys + kKeyTile - 1) / kKeyTile; }

template <typename Shape>
__device__ void produce(const Parameters& parameters, SharedStorage<Shape>& shared, const ObservedHead& head, Pass pass,
                        PartOf tiles) {
  ptx::shrink_registers<Roles::kProducerRegisters>();
  if (threadIdx.x < kConsumerThreads + 32) Producer<Shape>(parameters, shared, head, pass, tiles).run();
}

template <typename Shape>
__global__ void __launch_bounds__(Roles::kThreads, 1) statistics_kernel(const __grid_constant__ Parameters parameters) {
  auto& shared = shared_storage<Shape>();
  const ObservedHead head(parameters.arguments, static_cast<int>(blockIdx.y));
  const PartOf tiles(tiles_of(head.seen_keys), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (threadIdx.x >= kConsumerThreads) {
    produce(parameters, shared, head, Pass::statistics, tiles);
  } else {
    ptx::grow_registers<Roles::kConsumerRegisters>();
    Consumer<Shape>(parameters, shared, head).gather_statistics(tiles);
  }
}

template <typename Shape, bool kMaximum>
__global__ void __launch_bounds__(Roles::kThreads, 1) weights_kernel(const __grid_constant__ Parameters parameters) {
  auto& shared = shared_storage<Shape>();
  const ObservedHead head(parameters.arguments, static_cast<int>(blockIdx.y));
  const PartOf tiles(tiles_of(head.prefix), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (blockIdx.x == 0 && threadIdx.x == 0) check_room(parameters.arguments, parameters.launch, head);
  if (threadIdx.x >= kConsumerThreads) {
    produce(parameters, shared, head, Pass::weights, tiles);
  } else {
    ptx::grow_registers<Roles::kConsumerRegisters>();
    Consumer<Shape>(parameters, shared, head).template add_up_weights<kMaximum>(tiles);
  }
}

// ---- Launch ----

template <typename Shape>
Status launch(void (*kernel)(Parameters), const ObservationScoresArguments& a, const ObservationScoresLaunch& how) {
  Parameters parameters;
  parameters.arguments = a;
  parameters.launch = how;
  parameters.box_tokens = common_box(a.block_tokens, kKeyTile);
  const Status status = describe_pool(a, a.keys, parameters.box_tokens, &parameters.keys);
  if (!status.ok()) return status;
  constexpr int kSharedBytes = sizeof(SharedStorage<Shape>);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return cuda_status(error);
  const dim3 blocks(static_cast<unsigned>(how.parts), static_cast<unsigned>(a.batch * a.kv_heads));
  kernel<<<blocks, Roles::kThreads, kSharedBytes, how.stream>>>(parameters);
  return launch_status();
}

// Calls body with a Shape for these arguments.
template <typename Body>
Status with_shape(const ObservationScoresArguments& a, Body&& body) {
  if (a.cache_dtype == DType::f16) return a.head_dim == 64 ? body(Shape<__half, 64>{}) : body(Shape<__half, 128>{});
  return a.head_dim == 64 ? body(Shape<__nv_bfloat16, 64>{}) : body(Shape<__nv_bfloat16, 128>{});
}

}  // namespace

bool fits_observation_scores(const ObservationScoresArguments& a) {
  if (a.cache_dtype != DType::f16 && a.cache_dtype != DType::bf16) return false;
  if (a.query_dtype != a.cache_dtype || (a.head_dim != 64 && a.head_dim != 128)) return false;
  if (a.block_tokens % 8 != 0) return false;
  // The host knows only an upper bound of an entry's queries.
  if (a.reduction == GroupReduction::maximum && a.query_tokens > kRows) return false;
  for (const void* data : {a.query, a.keys}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  }
  for (const int64_t stride : {a.query_token_stride, a.query_head_stride, a.token_stride, a.block_stride}) {
    if (stride % 8 != 0) return false;
  }
  return true;
}

Status gather_statistics(const ObservationScoresArguments& a, const ObservationScoresLaunch& how) {
  return with_shape(a, [&](auto shape) { return launch<decltype(shape)>(statistics_kernel<decltype(shape)>, a, how); });
}

Status add_up_weights(const ObservationScoresArguments& a, const ObservationScoresLaunch& how) {
  const bool maximum = a.reduction == GroupReduction::maximum;
  return with_shape(a, [&](auto shape) {
    using Chosen = decltype(shape);
    return launch<Chosen>(maximum ? weights_kernel<Chosen, true> : weights_kernel<Chosen, false>, a, how);
  });
}

}  // namespace kv::sm90a
