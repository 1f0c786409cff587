// Prefill attention over dense and 2:4 blocks for Hopper, with mma and mma.sp.
//
// A persistent thread block takes work tiles of 24 query rows for each of its consumer warps. One producer warp reads
// the index maps and copies the keys and values of a tile through a ring of stages. Consumer warps meet only in the
// ring, so the softmax of some runs during the products of others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/prefill-attention-24/prefill-attention-24-warp.cuda.h"
#include "kernels/prefill-attention-24/prefill-attention-24-work.cuda.h"
#include "kernels/prefill-attention-24/prefill-attention-24.cuda.h"
#include "ptx/bulk-copy.cuda.h"
#include "shared/attention/hopper/persistent-blocks.cuda.h"
#include "shared/attention/hopper/pool-map.cuda.h"
#include "shared/attention/hopper/tiles.cuda.h"
#include "shared/attention/hopper/warp-roles.cuda.h"
#include "shared/cuda/stage-ring.cuda.h"

namespace kv::sm90a {
namespace {

template <typename ElementType, int kDim>
struct Shape {
  using Element = ElementType;
  using Roles = WarpRoles<kDim == 128 ? 2 : 3>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileRows = PrefillWarp24<Element, kDim>::kRows * Roles::kConsumerWarps;
  static constexpr int kStages = 6;  // of one block each
  static constexpr int kWorkStages = 2;
};

template <typename Shape>
struct SharedStorage {
  BlockStage24<typename Shape::Element, Shape::kHeadDim> keys[Shape::kStages];
  BlockStage24<typename Shape::Element, Shape::kHeadDim> values[Shape::kStages];
  int kinds[Shape::kStages];  // 1 for sparse keys, 2 for sparse values
  PrefillTile24 work[Shape::kWorkStages];  // key_blocks < 0 means that no work is left
  PrefillTile24 work_of_warp[Shape::Roles::kConsumerWarps];
  StageRing<Shape::kStages> block_ring;
  StageRing<Shape::kWorkStages> work_ring;
  uint64_t tail_landed;  // for the values of a block that is not full
};

struct Parameters {
  Attention24Arguments arguments;
  unsigned* tiles_taken;   // tiles taken after each block's first; 0 at launch
  CUtensorMap dense_keys;  // [block, token, dim]
  CUtensorMap dense_values;
};

// ---- Producer: one warp. ----

template <typename Shape>
class Producer {
 public:
  __device__ Producer(const Parameters& parameters, SharedStorage<Shape>& shared)
      : parameters_(parameters), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    PrefillWork24<Shape::kTileRows> work(parameters_.arguments);
    WorkNumber number(parameters_.tiles_taken);
    PrefillTile24 tile;
    for (; work.find(number.current(), &tile); number.advance()) {
      number.ask();
      publish(tile);
      load_blocks(tile);
    }
    tile.key_blocks = -1;
    publish(tile);
  }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;

  __device__ void publish(const PrefillTile24& tile) {
    shared_.work_ring.wait_empty(work_at_);
    if (lane_ == 0) {
      shared_.work[work_at_.stage] = tile;
      ptx::mbarrier_arrive(&shared_.work_ring.full[work_at_.stage]);
    }
    work_at_.advance();
  }

  __device__ void load_blocks(const PrefillTile24& tile) {
    const Attention24Arguments& arguments = parameters_.arguments;
    const int64_t first_entry = int64_t{tile.cache_head} * arguments.table_width;
    for (int first = 0; first < tile.key_blocks; first += 32) {
      // Each lane looks up one block.
      const int mine = min(first + lane_, tile.key_blocks - 1);
      const int key_entry = arguments.block_table[first_entry + mine];
      const int value_entry = arguments.value_table[first_entry + mine];
      for (int i = 0; i < min(32, tile.key_blocks - first); ++i) {
        load(__shfl_sync(kFullWarp, key_entry, i), __shfl_sync(kFullWarp, value_entry, i),
             tile.key_count - (first + i) * kBlock24Tokens);
      }
    }
  }

  // Copies a block, of which the first `tokens` count, to the next stage.
  __device__ void load(int key_entry, int value_entry, int tokens) {
    shared_.block_ring.wait_empty(block_at_);
    auto& keys = shared_.keys[block_at_.stage];
    auto& values = shared_.values[block_at_.stage];
    uint64_t* full = &shared_.block_ring.full[block_at_.stage];
    const bool whole = tokens >= kBlock24Tokens;
    if (lane_ == 0) {
      uint64_t* landed = whole ? full : &shared_.tail_landed;
      shared_.kinds[block_at_.stage] = (is_dense(key_entry) ? 0 : 1) | (is_dense(value_entry) ? 0 : 2);
      ptx::mbarrier_arrive_expect_bytes(landed, bytes(key_entry) + bytes(value_entry));
      copy(&parameters_.dense_keys, parameters_.arguments.sparse_keys, key_entry, keys, landed);
      copy(&parameters_.dense_values, parameters_.arguments.sparse_values, value_entry, values, landed);
    }
    __syncwarp();
    if (!whole) {
      // Weights of absent keys are 0. But 0 times the memory's old content may be NaN, so these rows are cleared.
      // Such a block is dense.
      ptx::mbarrier_wait(&shared_.tail_landed, tail_parity_);
      tail_parity_ ^= 1;
      clear_rows(values.dense, tokens, kBlock24Tokens);
      ptx::fence_async_proxy();
    }
    // Every lane arrives for itself: compute-sanitizer does not see that one lane's arrival covers the writes of its
    // warp.
    if (lane_ > 0 || !whole) ptx::mbarrier_arrive(full);
    __syncwarp();
    block_at_.advance();
  }

  using Stage = BlockStage24<typename Shape::Element, Shape::kHeadDim>;
  static constexpr int kNonZeroBytes = sizeof(Stage::sparse_keys);
  static constexpr int kMetadataBytes = sizeof(Stage::metadata);

  __device__ int bytes(int entry) { return is_dense(entry) ? sizeof(Stage::dense) : kNonZeroBytes + kMetadataBytes; }

  __device__ void copy(const CUtensorMap* dense, const SparseBlocks24& sparse, int entry, Stage& block,
                       uint64_t* barrier) {
    if (!is_dense(entry)) {
      const int64_t index = block_number(entry);
      ptx::bulk_copy(&block, static_cast<const char*>(sparse.non_zeros) + index * kNonZeroBytes, kNonZeroBytes,
                     barrier);
      ptx::bulk_copy(block.metadata, sparse.metadata + index * (kMetadataBytes / sizeof(uint32_t)), kMetadataBytes,
                     barrier);
    } else {
      copy_box(block.dense, 0, dense, 0, entry, barrier);
    }
  }

  const Parameters& parameters_;
  SharedStorage<Shape>& shared_;
  const int lane_;
  RingPosition<Shape::kStages> block_at_;
  RingPosition<Shape::kWorkStages> work_at_;
  uint32_t tail_parity_ = 0;
};

// ---- Consumers: a warp computes the outputs of 24 rows. ----

template <typename Shape>
class Consumer {
 public:
  using Element = typename Shape::Element;
  using Attention = PrefillWarp24<Element, Shape::kHeadDim>;

  __device__ Consumer(const Parameters& parameters, SharedStorage<Shape>& shared)
      : arguments_(parameters.arguments),
        shared_(shared),
        warp_row_((threadIdx.x - kWarpgroupThreads) / 32 * Attention::kRows) {}

  __device__ void run() {
    // Each warp has a copy of the tile in shared memory, because registers are scarce.
    PrefillTile24& tile = shared_.work_of_warp[warp_row_ / Attention::kRows];
    for (;;) {
      shared_.work_ring.wait_full(work_at_);
      if (threadIdx.x % 32 == 0) {
        tile = shared_.work[work_at_.stage];
        ptx::mbarrier_arrive(&shared_.work_ring.empty[work_at_.stage]);
      }
      work_at_.advance();
      __syncwarp();
      if (tile.key_blocks < 0) break;
      attend(tile);
      __syncwarp();
    }
  }

 private:
  __device__ void attend(const PrefillTile24& tile) {
    Attention attention(arguments_.scale);
    const int first_row = tile.first_row + warp_row_;
    load_queries<Element>(arguments_, tile, first_row, attention);
    const SeenBlocks blocks = tile.blocks(first_row, Attention::kRows);
    for (int number = 0; number < tile.key_blocks; ++number) {
      shared_.block_ring.wait_full(block_at_);
      if (number < blocks.seen) {
        // The lane that will release the stage reads this for all.
        const int kinds = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? shared_.kinds[block_at_.stage] : 0, 0);
        const bool sparse_keys = (kinds & 1) != 0;
        const bool sparse_values = (kinds & 2) != 0;
        weigh_keys(tile, first_row, number, number >= blocks.full, shared_.keys[block_at_.stage], sparse_keys,
                   attention);
        attention.accumulate(shared_.values[block_at_.stage], sparse_values);
      }
      __syncwarp();
      shared_.block_ring.release(block_at_);
      block_at_.advance();
    }
    attention.finish();
    store_outputs<Element>(arguments_, tile, first_row, attention);
  }

  const Attention24Arguments& arguments_;
  SharedStorage<Shape>& shared_;
  const int warp_row_;
  RingPosition<Shape::kStages> block_at_;
  RingPosition<Shape::kWorkStages> work_at_;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::Roles::kThreads, 1)
    prefill_attention_24_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.block_ring.init(Shape::Roles::kConsumerWarps, 32);
    shared.work_ring.init(Shape::Roles::kConsumerWarps);
    ptx::mbarrier_init(&shared.tail_landed, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  run_roles<typename Shape::Roles, Producer<Shape>, Consumer<Shape>>(parameters, shared);
}

// ---- Launch ----

Status describe_dense_blocks(const Attention24Arguments& arguments, const void* pool, CUtensorMap* map) {
  if (arguments.block_count == 0) return Status::success();
  return describe_pool(arguments, pool, kBlock24Tokens, map);
}

template <typename Shape>
Status launch(const Attention24Arguments& arguments, void* workspace, cudaStream_t stream) {
  Parameters parameters;
  parameters.arguments = arguments;
  parameters.tiles_taken = static_cast<unsigned*>(workspace);
  Status status = describe_dense_blocks(arguments, arguments.keys, &parameters.dense_keys);
  if (status.ok()) status = describe_dense_blocks(arguments, arguments.values, &parameters.dense_values);
  if (!status.ok()) return status;
  return launch_persistent(prefill_attention_24_kernel<Shape>, parameters, Shape::Roles::kThreads,
                           sizeof(SharedStorage<Shape>), parameters.tiles_taken, stream);
}

template <typename Element>
Status launch_for_head_dim(const Attention24Arguments& arguments, void* workspace, cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Shape<Element, 64>>(arguments, workspace, stream)
                                  : launch<Shape<Element, 128>>(arguments, workspace, stream);
}

}  // namespace

Status prefill_attention_24(const Attention24Arguments& arguments, void* workspace, cudaStream_t stream) {
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  return arguments.cache_dtype == DType::f16
             ? launch_for_head_dim<__half>(arguments, workspace, stream)
             : launch_for_head_dim<__nv_bfloat16>(arguments, workspace, stream);
}

}  // namespace kv::sm90a
