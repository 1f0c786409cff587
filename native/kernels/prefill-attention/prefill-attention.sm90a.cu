// Prefill attention for Hopper: O = softmax(scale * Q K^T) V, tile by tile with running maxima and sums, so
// that scores never leave registers.
//
// A persistent block takes work tiles from a queue: 64 queries of one head for each of its consumer
// warpgroups. One producer warp streams the keys and values of a tile, last tile first, through a ring of
// stages. The consumers compute S = Q K^T of one key tile while the tensor cores still add the previous
// tile's P V; one warpgroup's softmax runs under the other's products.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention-tensor-cores.h"
#include "kernels/online-softmax.h"
#include "kernels/prefill-attention/prefill-attention-work.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "kernels/stage-ring.h"
#include "ptx/matrix-load.h"
#include "ptx/register-shares.h"
#include "ptx/tensor-copy.h"
#include "ptx/wgmma.h"
#include "runtime/cuda-check.h"
#include "runtime/tensor-map.h"

namespace kv::sm90a {
namespace {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // rows of one wgmma
constexpr int kPanelColumns = 64;   // columns of 16-bit elements in a swizzled row
constexpr int kPanelBytes = 128;    // of such a row

template <typename ElementType, int kDim>
struct Shape {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr int kKeyTile = 128;
  // What the registers of a multiprocessor hold: 64 scores, 32 packed weights and kDim / 2 outputs a thread.
  static constexpr int kConsumerWarpgroups = kDim == 128 ? 2 : 3;
  static constexpr int kConsumerRegisters = kDim == 128 ? 240 : 160;
  static constexpr int kProducerRegisters = kDim == 128 ? 24 : 32;
  static constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;
  static constexpr int kQueryTile = kWarpgroupRows * kConsumerWarpgroups;
  static constexpr int kThreads = kWarpgroupThreads * (1 + kConsumerWarpgroups);
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kStages = 5;        // tiles of keys or values in shared memory
  static constexpr int kEarlyScores = 32;  // of a thread's 64
};

// Keys or values, in panels of 64 columns.
template <typename Shape>
using KeyValueTile = typename Shape::Element[Shape::kPanels][Shape::kKeyTile][kPanelColumns];

template <typename Shape>
struct alignas(1024) SharedStorage {
  using Element = typename Shape::Element;
  Element query[Shape::kConsumerWarpgroups][Shape::kPanels][kWarpgroupRows][kPanelColumns];
  KeyValueTile<Shape> tiles[Shape::kStages];
  Element output[Shape::kConsumerWarps][16][Shape::kHeadDim];
  StageRing<Shape::kStages> tile_ring;
  uint64_t work_posted;  // with its queries
  uint64_t work_taken;
  uint64_t tail_landed;  // the values of a key tile that is not full
  PrefillTile work;      // key_tiles < 0: no more work
};

struct Parameters {
  PagedAttentionArguments arguments;
  const int32_t* value_table;
  int box_tokens;         // of one copy: divides both block_tokens and the key tile
  unsigned* tiles_taken;  // beyond each block's first; 0 at launch
  CUtensorMap query;      // [token, query_head, dim]
  CUtensorMap keys;       // [block, block_token, dim]
  CUtensorMap values;
};

// ---- Producer: one warp; each lane looks up and copies one box of a tile. ----

template <typename Shape>
class Producer {
 public:
  __device__ Producer(const Parameters& parameters, SharedStorage<Shape>& shared)
      : parameters_(parameters), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    PrefillWork<Shape::kQueryTile, Shape::kKeyTile> work(parameters_.arguments);
    PrefillTile tile;
    unsigned number = blockIdx.x;
    while (work.find(number, &tile)) {
      unsigned next = 0;
      if (lane_ == 0) next = gridDim.x + atomicAdd(parameters_.tiles_taken, 1u);
      publish(tile);
      if (tile.key_tiles > 0) load_keys_and_values(tile);
      number = __shfl_sync(0xffffffffu, next, 0);
    }
    tile.key_tiles = -1;
    publish(tile);
  }

 private:
  // Waits until the consumers have read the previous work tile and its queries, then hands them the next.
  __device__ void publish(const PrefillTile& work) {
    // A fresh barrier's previous phase counts as complete.
    ptx::mbarrier_wait(&shared_.work_taken, taken_parity_ ^= 1);
    if (lane_ == 0) {
      shared_.work = work;
      ptx::mbarrier_arrive_expect_bytes(&shared_.work_posted, work.key_tiles > 0 ? sizeof(shared_.query) : 0);
    }
    if (work.key_tiles > 0 && lane_ < Shape::kConsumerWarpgroups * Shape::kPanels) {
      const int warpgroup = lane_ / Shape::kPanels;
      const int panel = lane_ % Shape::kPanels;
      ptx::tensor_copy(shared_.query[warpgroup][panel], &parameters_.query, panel * kPanelColumns,
                       work.query_head, work.first_row + work.first_query + warpgroup * kWarpgroupRows,
                       &shared_.work_posted);
    }
  }

  // In the order of use: values are wanted one step later than keys.
  __device__ void load_keys_and_values(const PrefillTile& work) {
    int key_tile = work.key_tiles - 1;
    Box box = last_box(work, key_tile);
    load_keys(box);
    for (; key_tile > 0; --key_tile) {
      const Box previous = box_before(box);
      load_keys(previous);
      load_values(work, key_tile, box);
      box = previous;
    }
    load_values(work, 0, box);
  }

  // Where this lane's box of a tile lies. Blocks are negative for lanes past the tile or the last key.
  struct Box {
    int entry;  // of the block tables
    int token;  // in the block
    int key_block;
    int value_block;
  };

  __device__ Box last_box(const PrefillTile& work, int key_tile) {
    const PagedAttentionArguments& arguments = parameters_.arguments;
    const int64_t row = int64_t{work.slot} * arguments.kv_heads + work.kv_head;
    key_table_ = arguments.block_table + row * arguments.table_width;
    value_table_ = parameters_.value_table + row * arguments.table_width;
    const int token = key_tile * Shape::kKeyTile + lane_ * parameters_.box_tokens;
    Box box;
    box.entry = token / arguments.block_tokens;
    box.token = token - box.entry * arguments.block_tokens;
    const bool present = lane_ * parameters_.box_tokens < Shape::kKeyTile && token < work.key_count;
    box.key_block = present ? key_table_[box.entry] : -1;
    box.value_block = present ? value_table_[box.entry] : -1;
    return box;
  }

  // The same lane's box of the key tile before.
  __device__ Box box_before(Box box) const {
    box.token -= Shape::kKeyTile;
    while (box.token < 0) {
      box.token += parameters_.arguments.block_tokens;
      --box.entry;
    }
    if (lane_ * parameters_.box_tokens < Shape::kKeyTile) {
      box.key_block = key_table_[box.entry];
      box.value_block = value_table_[box.entry];
    }
    return box;
  }

  __device__ void load_keys(const Box& box) {
    shared_.tile_ring.wait_empty(tile_at_);
    copy(&parameters_.keys, box, box.key_block, &shared_.tile_ring.full[tile_at_.stage]);
    tile_at_.advance();
  }

  __device__ void load_values(const PrefillTile& work, int key_tile, const Box& box) {
    shared_.tile_ring.wait_empty(tile_at_);
    uint64_t* full = &shared_.tile_ring.full[tile_at_.stage];
    const int keys = work.key_count - key_tile * Shape::kKeyTile;
    if (keys >= Shape::kKeyTile) {
      copy(&parameters_.values, box, box.value_block, full);
    } else {
      // Weights of absent keys are 0, but 0 times whatever lies there may be NaN: clear those rows first.
      copy(&parameters_.values, box, box.value_block, &shared_.tail_landed);
      ptx::mbarrier_wait(&shared_.tail_landed, tail_parity_);
      tail_parity_ ^= 1;
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        uint4* rows = reinterpret_cast<uint4*>(shared_.tiles[tile_at_.stage][panel][keys]);
        for (int i = lane_; i < (Shape::kKeyTile - keys) * kPanelBytes / 16; i += 32)
          rows[i] = make_uint4(0, 0, 0, 0);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(full);
    }
    tile_at_.advance();
  }

  // Copies every lane's box, from its block, to the current stage; the bytes count on `barrier`.
  __device__ void copy(const CUtensorMap* map, const Box& box, int block, uint64_t* barrier) {
    const unsigned present = __ballot_sync(0xffffffffu, block >= 0);
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect_bytes(
          barrier, __popc(present) * parameters_.box_tokens * Shape::kPanels * kPanelBytes);
    }
    if (block < 0) return;
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      ptx::tensor_copy(shared_.tiles[tile_at_.stage][panel][lane_ * parameters_.box_tokens], map,
                       panel * kPanelColumns, box.token, block, barrier);
    }
  }

  const Parameters& parameters_;
  SharedStorage<Shape>& shared_;
  const int lane_;
  RingPosition<Shape::kStages> tile_at_;
  const int32_t* key_table_ = nullptr;  // of the current slot and kv head
  const int32_t* value_table_ = nullptr;
  uint32_t taken_parity_ = 0;
  uint32_t tail_parity_ = 0;
};

// ---- Consumers: a warpgroup computes the outputs of 64 queries. ----

template <typename Shape>
class Consumer {
 public:
  using Element = typename Shape::Element;

  __device__ Consumer(const Parameters& parameters, SharedStorage<Shape>& shared)
      : arguments_(parameters.arguments),
        shared_(shared),
        warpgroup_(threadIdx.x / kWarpgroupThreads - 1),
        warp_(threadIdx.x / 32 - 4),
        lane_(threadIdx.x % 32) {}

  __device__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(&shared_.work_posted, parity);
      const PrefillTile work = shared_.work;
      if (work.key_tiles < 0) break;
      attend(work);
    }
  }

 private:
  static constexpr int kScores = Shape::kKeyTile / 2;  // of a thread
  static constexpr int kOutputs = Shape::kHeadDim / 2;
  using Position = RingPosition<Shape::kStages>;

  // Rows of scores that a thread holds: `row` and row + 8 of the work tile.
  __device__ int row() const { return warp_ * 16 + lane_ / 4; }

  // By each thread for itself: compute-sanitizer does not see that one lane's arrival covers its warp's reads.
  __device__ void release_work() { ptx::mbarrier_arrive(&shared_.work_taken); }

  __device__ Position next_tile() {
    const Position at = tile_at_;
    tile_at_.advance();
    return at;
  }

  __device__ void attend(const PrefillTile& work) {
    OnlineSoftmax softmax(arguments_.scale);
    float output[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;

    if (work.key_tiles > 0) {
      uint32_t weights[kScores / 2];
      int key_tile = work.key_tiles - 1;
      first_step(work, key_tile, softmax, weights);
      // The tiles that reach past the last key that every query sees come first.
      const int first_partial = max(0, min(work.visible_keys, work.key_count)) / Shape::kKeyTile;
      for (--key_tile; key_tile >= first_partial; --key_tile) {
        step<true>(work, key_tile, softmax, output, weights);
      }
      for (; key_tile >= 0; --key_tile) step<false>(work, key_tile, softmax, output, weights);
      release_work();
      last_step(output, weights);
    } else {
      release_work();
    }
    softmax.finish();
    store(work, softmax, output);
  }

  // Scores and weights of the first key tile.
  __device__ void first_step(const PrefillTile& work, int key_tile, OnlineSoftmax& softmax,
                             uint32_t (&weights)[kScores / 2]) {
    float scores[kScores];
    float correction[2];
    const Position keys = next_tile();
    shared_.tile_ring.wait_full(keys);
    ptx::wgmma_fence();
    issue_scores(keys, scores);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(scores);
    shared_.tile_ring.release(keys);
    mask(work, key_tile, scores);
    softmax.observe(scores, correction);
    softmax.weigh<0, kScores>(scores);
    pack_weights(scores, weights);
    if (key_tile > 0) shared_.tile_ring.wait_full(tile_at_);
  }

  // Scores and weights of this key tile, whose keys have landed, while the previous tile's weights meet their
  // values.
  template <bool kMasked>
  __device__ void step(const PrefillTile& work, int key_tile, OnlineSoftmax& softmax,
                       float (&output)[kOutputs], uint32_t (&weights)[kScores / 2]) {
    float scores[kScores];
    float correction[2];
    const Position keys = next_tile();
    const Position values = next_tile();
    ptx::pin_registers(output);
    ptx::wgmma_fence();
    issue_scores(keys, scores);
    shared_.tile_ring.wait_full(values);
    ptx::wgmma_fence();
    issue_output(values, weights, output);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(scores);
    shared_.tile_ring.release(keys);
    if constexpr (kMasked) mask(work, key_tile, scores);
    const bool corrects = softmax.observe(scores, correction);
    // These run under the products of the previous weights. What follows must not move up before they are
    // done: the wait for the next keys, a loop, keeps the compiler from that.
    softmax.weigh<0, Shape::kEarlyScores>(scores);
    if (key_tile > 0) shared_.tile_ring.wait_full(tile_at_);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(output);
    shared_.tile_ring.release(values);
    if (corrects) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] *= correction[(i >> 1) & 1];
    }
    softmax.weigh<Shape::kEarlyScores, kScores>(scores);
    pack_weights(scores, weights);
  }

  __device__ void pack_weights(const float (&scores)[kScores], uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = ptx::pack<Element>(scores[2 * i], scores[2 * i + 1]);
  }

  // The last key tile's weights meet their values.
  __device__ void last_step(float (&output)[kOutputs], uint32_t (&weights)[kScores / 2]) {
    const Position values = next_tile();
    shared_.tile_ring.wait_full(values);
    ptx::pin_registers(output);
    ptx::wgmma_fence();
    issue_output(values, weights, output);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(output);
    shared_.tile_ring.release(values);
  }

  __device__ void issue_scores(Position at, float (&scores)[kScores]) {
    const uint64_t query = ptx::wgmma_operand(shared_.query[warpgroup_]);
    const uint64_t keys = ptx::wgmma_operand(shared_.tiles[at.stage]);
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
#pragma unroll
      for (int bytes = 0; bytes < kPanelBytes; bytes += 32) {
        ptx::WgmmaShared<Element, Shape::kKeyTile>::issue(
            scores, ptx::wgmma_advance(query, panel * kWarpgroupRows * kPanelBytes + bytes),
            ptx::wgmma_advance(keys, panel * Shape::kKeyTile * kPanelBytes + bytes), panel + bytes > 0);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ void issue_output(Position at, uint32_t (&weights)[kScores / 2], float (&output)[kOutputs]) {
    const uint64_t values = ptx::wgmma_operand(shared_.tiles[at.stage], Shape::kKeyTile * kPanelBytes);
#pragma unroll
    for (int key = 0; key < Shape::kKeyTile; key += 16) {
      ptx::WgmmaRegisters<Element, Shape::kHeadDim>::issue(output, &weights[key / 4],
                                                           ptx::wgmma_advance(values, key * kPanelBytes));
    }
    ptx::wgmma_commit();
  }

  // Scores become minus infinity where the key is absent or comes after the query.
  __device__ void mask(const PrefillTile& work, int key_tile, float (&scores)[kScores]) {
    const int first_key = key_tile * Shape::kKeyTile + 2 * (lane_ % 4);
    const int advance = arguments_.causal ? 1 : 0;
    const int seen[2] = {min(work.visible_keys + advance * row(), work.key_count) - first_key,
                         min(work.visible_keys + advance * (row() + 8), work.key_count) - first_key};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = 8 * (i / 4) + i % 2;
      if (key >= seen[(i >> 1) & 1]) scores[i] = -INFINITY;
    }
  }

  __device__ void store(const PrefillTile& work, const OnlineSoftmax& softmax,
                        const float (&output)[kOutputs]) {
    // Through shared memory, so that whole rows go out; 16-byte chunks are permuted against bank conflicts.
    auto& staging = shared_.output[warp_];
    const float normalizer[2] = {OnlineSoftmax::normalizer(softmax.sum(0)),
                                 OnlineSoftmax::normalizer(softmax.sum(1))};
    const int matrix = lane_ / 8;
    const int matrix_row = matrix % 2 * 8 + lane_ % 8;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOutputs; i += 8) {
      const int chunk = (i / 4 + matrix / 2) ^ (lane_ % 8);
      const uint32_t fragment[4] = {
          ptx::pack<Element>(output[i] * normalizer[0], output[i + 1] * normalizer[0]),
          ptx::pack<Element>(output[i + 2] * normalizer[1], output[i + 3] * normalizer[1]),
          ptx::pack<Element>(output[i + 4] * normalizer[0], output[i + 5] * normalizer[0]),
          ptx::pack<Element>(output[i + 6] * normalizer[1], output[i + 7] * normalizer[1])};
      ptx::store_matrices(&staging[matrix_row][chunk * 8], fragment);
    }
    __syncwarp();
    constexpr int kChunks = Shape::kHeadDim / 8;
    Element* rows =
        static_cast<Element*>(arguments_.output) +
        (int64_t{work.first_row} + work.first_query + warp_ * 16) * arguments_.output_token_stride +
        work.query_head * arguments_.output_head_stride;
    const int rows_left = work.query_count - work.first_query - warp_ * 16;
    for (int i = lane_; i < 16 * kChunks; i += 32) {
      const int staged_row = i / kChunks;
      const int chunk = i % kChunks;
      if (staged_row >= rows_left) break;
      *reinterpret_cast<uint4*>(rows + staged_row * arguments_.output_token_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(&staging[staged_row][(chunk ^ (staged_row % 8)) * 8]);
    }
    if (arguments_.log_sum_exp == nullptr || lane_ % 4 != 0) return;
    for (int half = 0; half < 2; ++half) {
      const int query = work.first_query + row() + 8 * half;
      if (query >= work.query_count) break;
      arguments_.log_sum_exp[(int64_t{work.first_row} + query) * arguments_.query_heads + work.query_head] =
          OnlineSoftmax::log_sum_exp(softmax.reference(half), softmax.sum(half));
    }
  }

  const PagedAttentionArguments& arguments_;
  SharedStorage<Shape>& shared_;
  const int warpgroup_;
  const int warp_;  // among all consumers
  const int lane_;
  Position tile_at_;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.tile_ring.init(Shape::kConsumerWarps);
    ptx::mbarrier_init(&shared.work_posted, 1);
    ptx::mbarrier_init(&shared.work_taken, 32 * Shape::kConsumerWarps);
    ptx::mbarrier_init(&shared.tail_landed, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::shrink_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) Producer<Shape>(parameters, shared).run();
  } else {
    ptx::grow_registers<Shape::kConsumerRegisters>();
    Consumer<Shape>(parameters, shared).run();
  }
}

// ---- Launch ----

// The largest power of two up to 128 that divides both.
int common_box(int block_tokens, int key_tile) {
  int box = 128;
  while (block_tokens % box != 0 || key_tile % box != 0) box /= 2;
  return box;
}

Status describe_tensors(Parameters& parameters) {
  const PagedAttentionArguments& arguments = parameters.arguments;
  TensorBox query;
  query.dtype = arguments.query_dtype;
  query.data = arguments.query;
  query.extents = {arguments.head_dim, arguments.query_heads, arguments.query_tokens};
  query.strides = {arguments.query_head_stride, arguments.query_token_stride};
  query.box = {kPanelColumns, 1, kWarpgroupRows};
  TensorBox pool;
  pool.dtype = arguments.cache_dtype;
  pool.extents = {arguments.head_dim, arguments.block_tokens, arguments.block_count};
  pool.strides = {arguments.token_stride, arguments.block_stride};
  pool.box = {kPanelColumns, parameters.box_tokens, 1};
  Status status = encode_tensor_map(query, &parameters.query);
  pool.data = arguments.keys;
  if (status.ok()) status = encode_tensor_map(pool, &parameters.keys);
  pool.data = arguments.values;
  if (status.ok()) status = encode_tensor_map(pool, &parameters.values);
  return status;
}

template <typename Shape>
Status launch(const PagedAttentionArguments& arguments, const int32_t* value_table, void* workspace,
              cudaStream_t stream) {
  Parameters parameters;
  parameters.arguments = arguments;
  parameters.value_table = value_table;
  parameters.box_tokens = common_box(arguments.block_tokens, Shape::kKeyTile);
  parameters.tiles_taken = static_cast<unsigned*>(workspace);
  const Status status = describe_tensors(parameters);
  if (!status.ok()) return status;

  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = prefill_attention_kernel<Shape>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Shape>);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error == cudaSuccess) error = cudaMemsetAsync(workspace, 0, sizeof(unsigned), stream);
  if (error != cudaSuccess) return cuda_status(error);
  kernel<<<multiprocessors, Shape::kThreads, kSharedBytes, stream>>>(parameters);
  return launch_status();
}

template <typename Element>
Status launch_for_head_dim(const PagedAttentionArguments& arguments, const int32_t* value_table, void* workspace,
                           cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Shape<Element, 64>>(arguments, value_table, workspace, stream)
                                  : launch<Shape<Element, 128>>(arguments, value_table, workspace, stream);
}

}  // namespace

Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* workspace,
                         cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, kPrefillBlockMultiple)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core prefill attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  return arguments.cache_dtype == DType::f16
             ? launch_for_head_dim<__half>(arguments, value_table, workspace, stream)
             : launch_for_head_dim<__nv_bfloat16>(arguments, value_table, workspace, stream);
}

}  // namespace kv::sm90a
