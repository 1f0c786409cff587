// Prefill attention over dense and 2:4 blocks for Hopper, with wgmma and wgmma.sp.
//
// A persistent thread block takes work tiles of some query rows for each of its consumer warpgroups. One producer warp
// reads the index maps and copies the keys and values of a tile through two rings of stages. Consumers meet only in
// the rings, so the softmax of some runs during the products of others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/prefill-attention-24/prefill-attention-24-warpgroup.cuda.h"
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

// Each consumer reads keys and values from shared memory anew. With 128 dims two of many rows are therefore faster than
// three of fewer. With 64 dims exponentials take as long as products, and more warps hide more of both.
template <typename ElementType, int kDim>
struct Shape {
  using Element = ElementType;
  using Roles = WarpRoles<kDim == 128 ? 2 : 3>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kRows = kDim == 128 ? 96 : 64;  // of a consumer
  static constexpr int kTileRows = kRows * Roles::kConsumerWarpgroups;
  static constexpr int kStages = kDim == 128 ? 3 : 5;  // of keys, and as many of values
  static constexpr int kWorkStages = 2;
};

// Keys or values on their way from the producer to the consumers, a block in each stage.
template <typename Shape>
struct BlockRing {
  BlockStage24<typename Shape::Element, Shape::kHeadDim> blocks[Shape::kStages];
  int sparse[Shape::kStages];  // 0 or 1
  StageRing<Shape::kStages> ring;
};

template <typename Shape>
struct SharedStorage {
  using Consumer = WarpgroupStorage24<typename Shape::Element, Shape::kHeadDim, Shape::kRows>;
  Consumer consumers[Shape::Roles::kConsumerWarpgroups];
  BlockRing<Shape> keys;
  BlockRing<Shape> values;
  PrefillTile24 work[Shape::kWorkStages];  // key_blocks < 0 means that no work is left
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

  // Copies a block, of which the first `tokens` count, to the next stages.
  __device__ void load(int key_entry, int value_entry, int tokens) {
    const bool whole = tokens >= kBlock24Tokens;
    uint64_t* values_full = &shared_.values.ring.full[value_at_.stage];
    copy(parameters_.dense_keys, parameters_.arguments.sparse_keys, key_entry, shared_.keys, key_at_,
         &shared_.keys.ring.full[key_at_.stage]);
    copy(parameters_.dense_values, parameters_.arguments.sparse_values, value_entry, shared_.values, value_at_,
         whole ? values_full : &shared_.tail_landed);
    if (!whole) {
      // Weights of absent keys are 0. But 0 times the memory's old content may be NaN, so these rows are cleared.
      // Such a block is dense.
      ptx::mbarrier_wait(&shared_.tail_landed, tail_parity_);
      tail_parity_ ^= 1;
      clear_rows(shared_.values.blocks[value_at_.stage].dense, tokens, kBlock24Tokens);
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(values_full);
    }
    key_at_.advance();
    value_at_.advance();
  }

  // Starts the copy of a block to a stage. The bytes count on `landed`.
  __device__ void copy(const CUtensorMap& dense, const SparseBlocks24& sparse, int entry, BlockRing<Shape>& to,
                       RingPosition<Shape::kStages> at, uint64_t* landed) {
    to.ring.wait_empty(at);
    if (lane_ == 0) {
      Stage& block = to.blocks[at.stage];
      to.sparse[at.stage] = is_dense(entry) ? 0 : 1;
      if (is_dense(entry)) {
        ptx::mbarrier_arrive_expect_bytes(landed, sizeof(block.dense));
        copy_box(block.dense, 0, &dense, 0, entry, landed);
      } else {
        const int64_t index = block_number(entry);
        ptx::mbarrier_arrive_expect_bytes(landed, kNonZeroBytes + kMetadataBytes);
        ptx::bulk_copy(&block, static_cast<const char*>(sparse.non_zeros) + index * kNonZeroBytes, kNonZeroBytes,
                       landed);
        ptx::bulk_copy(block.metadata, sparse.metadata + index * (kMetadataBytes / sizeof(uint32_t)), kMetadataBytes,
                       landed);
      }
    }
    __syncwarp();
  }

  using Stage = BlockStage24<typename Shape::Element, Shape::kHeadDim>;
  static constexpr int kNonZeroBytes = sizeof(Stage::sparse_keys);
  static constexpr int kMetadataBytes = sizeof(Stage::metadata);

  const Parameters& parameters_;
  SharedStorage<Shape>& shared_;
  const int lane_;
  RingPosition<Shape::kStages> key_at_;
  RingPosition<Shape::kStages> value_at_;
  RingPosition<Shape::kWorkStages> work_at_;
  uint32_t tail_parity_ = 0;
};

// ---- Consumers: a warpgroup computes the outputs of Shape::kRows rows. ----

template <typename Shape>
class Consumer {
 public:
  using Element = typename Shape::Element;
  using Attention = PrefillWarpgroup24<Element, Shape::kHeadDim, Shape::kRows>;

  __device__ Consumer(const Parameters& parameters, SharedStorage<Shape>& shared)
      : arguments_(parameters.arguments),
        shared_(shared),
        // By a shuffle, so that the compiler sees that it is the same in all lanes, and so are addresses and branches.
        warpgroup_(__shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads - 1, 0)) {}

  __device__ void run() {
    for (;;) {
      shared_.work_ring.wait_full(work_at_);
      const PrefillTile24& tile = shared_.work[work_at_.stage];
      if (tile.key_blocks < 0) break;
      attend(tile);
      __syncwarp();
      shared_.work_ring.release(work_at_);
      work_at_.advance();
    }
  }

 private:
  using Operand = typename Attention::Operand;
  using Position = RingPosition<Shape::kStages>;

  __device__ void attend(const PrefillTile24& tile) {
    const int first_row = tile.first_row + warpgroup_ * Shape::kRows;
    const SeenBlocks blocks = tile.blocks(first_row, Shape::kRows);
    Attention attention(arguments_.scale, shared_.consumers[warpgroup_], 1 + warpgroup_);
    attention.load_queries(arguments_, tile, first_row);
    if (blocks.seen > 0) {
      Operand keys;
      Operand values;
      first_step(tile, first_row, blocks.seen, keys, values, attention);
      int number = 1;
      for (; number < min(blocks.full, blocks.seen); ++number) {
        step<false>(tile, first_row, number, blocks.seen, keys, values, attention);
      }
      for (; number < blocks.seen; ++number) {
        step<true>(tile, first_row, number, blocks.seen, keys, values, attention);
      }
      last_step(values, attention);
    }
    for (int number = blocks.seen; number < tile.key_blocks; ++number) skip();
    attention.store_outputs(arguments_, tile, first_row);
  }

  // Computes the weights of the first block.
  __device__ __forceinline__ void first_step(const PrefillTile24& tile, int first_row, int seen, Operand& keys,
                                             Operand& values, Attention& attention) {
    await_keys(keys, attention);
    score<true>(tile, first_row, 0, keys, attention);
    attention.raise(Attention::kAllColumns);
    attention.template weigh<false>();
    const Position key_at = key_at_;
    key_at_.advance();
    if (seen > 1) await_keys(keys, attention);
    await_values(values, attention);
    attention.agree(false);
    shared_.keys.ring.release(key_at);
  }

  // Computes the weights of a block, whose keys have landed. Meanwhile the weights of the previous block are multiplied
  // by their values, which have landed too.
  template <bool kMasked>
  __device__ __forceinline__ void step(const PrefillTile24& tile, int first_row, int number, int seen, Operand& keys,
                                       Operand& values, Attention& attention) {
    attention.score(keys);
    attention.accumulate(values);
    attention.template wait_scores<Attention::kPanels>();
    if (kMasked) attention.mask(tile, first_row, number);
    const bool too_large = attention.template weigh<false>();
    const Position key_at = key_at_;
    const Position value_at = value_at_;
    key_at_.advance();
    value_at_.advance();
    if (number + 1 < seen) await_keys(keys, attention);
    shared_.values.ring.wait_full(value_at_);
    attention.wait_outputs();
    // Not before: the products were still reading the metadata from registers.
    await_values(values, attention);
    if (!attention.agree(too_large)) {
      score<kMasked>(tile, first_row, number, attention.keys(shared_.keys, key_at.stage), attention);
      attention.raise(attention.columns_to_raise());
      attention.template weigh<true>();
      attention.agree(false);
    }
    shared_.values.ring.release(value_at);
    shared_.keys.ring.release(key_at);
  }

  // Multiplies the weights of the last block by their values.
  __device__ __forceinline__ void last_step(const Operand& values, Attention& attention) {
    attention.accumulate(values);
    attention.wait_outputs();
    shared_.values.ring.release(value_at_);
    value_at_.advance();
  }

  // Passes a block that no row sees.
  __device__ void skip() {
    shared_.keys.ring.wait_full(key_at_);
    shared_.keys.ring.release(key_at_);
    key_at_.advance();
    shared_.values.ring.wait_full(value_at_);
    shared_.values.ring.release(value_at_);
    value_at_.advance();
  }

  template <bool kMasked>
  __device__ __forceinline__ void score(const PrefillTile24& tile, int first_row, int number, const Operand& keys,
                                        Attention& attention) {
    attention.score(keys);
    attention.template wait_scores<0>();
    if (kMasked) attention.mask(tile, first_row, number);
  }

  __device__ __forceinline__ void await_keys(Operand& keys, const Attention& attention) {
    shared_.keys.ring.wait_full(key_at_);
    keys = attention.keys(shared_.keys, key_at_.stage);
  }

  __device__ __forceinline__ void await_values(Operand& values, const Attention& attention) {
    shared_.values.ring.wait_full(value_at_);
    values = attention.values(shared_.values, value_at_.stage);
  }

  const Attention24Arguments& arguments_;
  SharedStorage<Shape>& shared_;
  const int warpgroup_;
  Position key_at_;
  Position value_at_;
  RingPosition<Shape::kWorkStages> work_at_;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::Roles::kThreads, 1)
    prefill_attention_24_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.keys.ring.init(Shape::Roles::kConsumerWarps);
    shared.values.ring.init(Shape::Roles::kConsumerWarps);
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
