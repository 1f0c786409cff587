// Reads dense blocks of keys or values, 16 bytes a lane, and prunes them in registers: for the loss, and for the 2:4
// blocks. compress-24-plan.cuda.cu decides which.
#include "kernels/compress-24/compress-24-group.h"
#include "kernels/compress-24/compress-24.cuda.h"
#include "kernels/cuda-elements.h"
#include "runtime/device.h"

namespace kv {
namespace {

struct Parameters {
  Compress24Arguments arguments;
  PruningPlan plan;
};

// ---- What a thread block sees of the plan. ----

__device__ BlockMove move_of(const Parameters& parameters, int block) {
  return parameters.plan.blocks[int64_t{blockIdx.y} * parameters.arguments.most_blocks + block];
}

__device__ const uint16_t* dense_block(const Compress24Arguments& arguments, int place) {
  return static_cast<const uint16_t*>(arguments.dense) + int64_t{place - 1} * kMixedBlockTokens * arguments.head_dim;
}

__device__ const uint8_t* mask_of(const Compress24Arguments& arguments) {
  const int kv_head = arguments.prunings[blockIdx.y].table_row % arguments.kv_heads;
  return arguments.element_mask + int64_t{kv_head} * kMixedBlockTokens * arguments.head_dim;
}

// ---- Groups of four. ----

// The bits of eight bytes that are not zero.
__device__ uint32_t bits_of(uint2 bytes) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8 & 0xffu) != 0) bits |= 1u << i;
  }
  return bits;
}

template <bool kMasked>
__device__ KeptOf4 keep(GroupOf4 group, uint32_t mask) {
  return kMasked ? keep_masked(group, mask) : keep_largest(group);
}

template <typename Element>
__device__ float lost(GroupOf4 group, bool masked, uint32_t mask) {
  const Magnitudes magnitude(group);
  const LargestTwo largest(magnitude);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool kept = masked ? (mask >> i & 1u) != 0 : largest.kept[i];
    const auto bits = static_cast<uint16_t>(magnitude.of[i]);
    if (!kept) sum += to_float(reinterpret_cast<const Element&>(bits));
  }
  return sum;
}

// The elements of dims 2 * pair and 2 * pair + 1 of four tokens, as two groups.
struct TokenGroups {
  GroupOf4 of[2];

  __device__ TokenGroups(const uint4 (&tokens)[4], int pair) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = word_of(tokens[i], pair);
    of[0] = {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410)};
    of[1] = {__byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)};
  }

  static __device__ uint32_t word_of(uint4 words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
};

// Bit i is bit `dim` of bits[i].
__device__ uint32_t column_of(const uint32_t (&bits)[4], int dim) {
  uint32_t column = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) column |= (bits[i] >> dim & 1u) << i;
  return column;
}

// ---- Compression. ----

// A warp takes a tile of 16 tokens; a lane eight dims of a token and of the one eight further, so that it holds both
// halves of words of metadata.
template <int kHeadDim, bool kMasked>
struct KeyCompression {
  static constexpr int kThreads = 128;
  static constexpr int kBlocksInTurn = 4;  // that one thread block compresses

  static __device__ void run(const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros, uint32_t* metadata) {
    constexpr int kLanes = kHeadDim / 8;  // of a row
    constexpr int kRows = 32 / kLanes;    // at once
    const int lane = threadIdx.x % 32;
    const int dim = lane % kLanes * 8;
    const int first_token = threadIdx.x / 32 * 16 + lane / kLanes;
    uint4 rows[8 / kRows][2];
    uint32_t masks[8 / kRows][2] = {};
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      const int at = (first_token + i / 2 * kRows + i % 2 * 8) * kHeadDim + dim;
      rows[i / 2][i % 2] = __ldcs(reinterpret_cast<const uint4*>(dense + at));
      if (kMasked) masks[i / 2][i % 2] = bits_of(*reinterpret_cast<const uint2*>(mask + at));
    }
#pragma unroll
    for (int step = 0; step < 8 / kRows; ++step) {
      uint32_t word = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 row = rows[step][half];
        const KeptOf4 low = keep<kMasked>({row.x, row.y}, masks[step][half] & 15u);
        const KeptOf4 high = keep<kMasked>({row.z, row.w}, masks[step][half] >> 4);
        const int token = first_token + step * kRows + half * 8;
        *reinterpret_cast<uint2*>(non_zeros + key_non_zero(token, dim / 2, kHeadDim)) = {low.values, high.values};
        const uint32_t own = high.nibble << 4 | low.nibble;
        const uint32_t next = __shfl_down_sync(0xffffffffu, own, 1);
        word |= (next << 8 | own) << half * 16;
      }
      if (lane % 2 == 0) metadata[key_meta16(first_token + step * kRows, dim / 16, kHeadDim).word] = word;
    }
  }
};

// A thread takes eight dims of 16 tokens. It holds one half of each of eight words of metadata, its neighbour, of the
// next eight dims, the other.
template <int kHeadDim, bool kMasked>
struct ValueCompression {
  static constexpr int kThreads = kHeadDim / 2;
  static constexpr int kBlocksInTurn = 1;

  static __device__ void run(const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros, uint32_t* metadata) {
    const int dim = threadIdx.x % (kHeadDim / 8) * 8;
    const int quarter = threadIdx.x / (kHeadDim / 8);  // of the block's tokens
    uint4 rows[4][4];
    uint32_t masks[4][4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = (16 * quarter + i) * kHeadDim + dim;
      rows[i / 4][i % 4] = __ldcs(reinterpret_cast<const uint4*>(dense + at));
      if (kMasked) masks[i / 4][i % 4] = bits_of(*reinterpret_cast<const uint2*>(mask + at));
    }
    uint32_t meta16[8] = {};
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      uint32_t kept[2][4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const TokenGroups groups(rows[group], pair);
        KeptOf4 of[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          of[i] = keep<kMasked>(groups.of[i], column_of(masks[group], 2 * pair + i));
          meta16[2 * pair + i] |= of[i].nibble << 4 * group;
        }
        kept[0][pair] = __byte_perm(of[0].values, of[1].values, 0x5410);
        kept[1][pair] = __byte_perm(of[0].values, of[1].values, 0x7632);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint4*>(non_zeros + value_non_zero(2 * (4 * quarter + group) + i, dim)) = {
            kept[i][0], kept[i][1], kept[i][2], kept[i][3]};
      }
    }
    const bool upper = dim % 16 != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? meta16[i] : meta16[i + 4], 1);
      const uint32_t word = upper ? meta16[i + 4] << 16 | other : other << 16 | meta16[i];
      metadata[value_meta16(dim / 16 * 16 + (upper ? i + 4 : i), quarter).word] = word;
    }
  }
};

template <int kHeadDim, template <int, bool> class Compression, bool kMasked>
__global__ void __launch_bounds__(Compression<kHeadDim, kMasked>::kThreads)
    compress_kernel(const __grid_constant__ Parameters parameters) {
  constexpr int kBlocksInTurn = Compression<kHeadDim, kMasked>::kBlocksInTurn;
  const Compress24Arguments& arguments = parameters.arguments;
  BlockMove moves[kBlocksInTurn];
#pragma unroll
  for (int i = 0; i < kBlocksInTurn; ++i) {
    const int block = blockIdx.x * kBlocksInTurn + i;
    moves[i] = block < arguments.most_blocks ? move_of(parameters, block) : BlockMove{0, 0};
  }
#pragma unroll 1
  for (int i = 0; i < kBlocksInTurn; ++i) {
    const BlockMove move = moves[0];
#pragma unroll
    for (int j = 1; j < kBlocksInTurn; ++j) moves[j - 1] = moves[j];
    if (move.to >= 0) continue;
    const int64_t sparse = -(int64_t{move.to} + 1);
    Compression<kHeadDim, kMasked>::run(
        dense_block(arguments, move.place), kMasked ? mask_of(arguments) : nullptr,
        static_cast<uint16_t*>(arguments.non_zeros) + sparse * sparse_block_elements(kHeadDim),
        arguments.metadata + sparse * sparse_block_words(kHeadDim));
  }
}

// ---- Losses. ----

constexpr int kLossThreads = 128;
constexpr int kLossBlocks = 32;  // thread blocks that share a pruning's blocks

// A thread's share of a block's loss.
template <typename Element>
__device__ float loss_of(const Compress24Arguments& arguments, const uint16_t* dense, const uint8_t* mask) {
  const bool masked = mask != nullptr;
  const int chunks = arguments.head_dim / 8;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < kMixedBlockTokens / 4 * chunks; i += kLossThreads) {
    const int at = i / chunks * 4 * arguments.head_dim + i % chunks * 8;
    uint4 rows[4];
    uint32_t masks[4] = {};
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      rows[row] = *reinterpret_cast<const uint4*>(dense + at + row * arguments.head_dim);
      if (masked) masks[row] = bits_of(*reinterpret_cast<const uint2*>(mask + at + row * arguments.head_dim));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (arguments.operand == KvOperand::keys) {
        sum += lost<Element>({rows[j].x, rows[j].y}, masked, masks[j] & 15u);
        sum += lost<Element>({rows[j].z, rows[j].w}, masked, masks[j] >> 4);
      } else {
        const TokenGroups groups(rows, j);
        sum += lost<Element>(groups.of[0], masked, column_of(masks, 2 * j));
        sum += lost<Element>(groups.of[1], masked, column_of(masks, 2 * j + 1));
      }
    }
  }
  return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kLossThreads) loss_kernel(const __grid_constant__ Parameters parameters) {
  const Compress24Arguments& arguments = parameters.arguments;
  if (parameters.plan.ranks[blockIdx.y] == 0) return;
  const Pruning& pruning = arguments.prunings[blockIdx.y];
  const int blocks = pruning.end_block - pruning.first_block;
  const int32_t* places =
      arguments.table + int64_t{pruning.table_row} * arguments.table_width + pruning.first_block;
  const uint8_t* mask = arguments.element_mask != nullptr ? mask_of(arguments) : nullptr;
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int place = places[block];
    if (place <= 0) continue;
    const float loss = block_sum(loss_of<Element>(arguments, dense_block(arguments, place), mask));
    if (threadIdx.x == 0) {
      parameters.plan.losses[int64_t{blockIdx.y} * arguments.most_blocks + block] = __float_as_uint(loss) & 0x7fffffffu;
    }
  }
}

// ---- Moves of blocks that stay dense. ----

constexpr int kMoveThreads = 128;

__global__ void __launch_bounds__(kMoveThreads) move_kernel(const __grid_constant__ Parameters parameters) {
  const Compress24Arguments& arguments = parameters.arguments;
  if (parameters.plan.moves[blockIdx.y] == 0) return;
  for (int block = blockIdx.x; block < arguments.most_blocks; block += gridDim.x) {
    const BlockMove move = move_of(parameters, block);
    if (move.to <= 0) continue;
    const auto* from = reinterpret_cast<const uint4*>(dense_block(arguments, move.place));
    auto* to = const_cast<uint4*>(reinterpret_cast<const uint4*>(dense_block(arguments, move.to)));
    const int chunks = kMixedBlockTokens * arguments.head_dim / 8;
    for (int i = threadIdx.x; i < chunks; i += kMoveThreads) to[i] = from[i];
  }
}

dim3 grid_of(const Compress24Arguments& arguments, int blocks) {
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(arguments.pruning_count)};
}

template <int kHeadDim, template <int, bool> class Compression>
void launch_compression(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  constexpr int kBlocksInTurn = Compression<kHeadDim, false>::kBlocksInTurn;
  const dim3 grid = grid_of(arguments, (arguments.most_blocks + kBlocksInTurn - 1) / kBlocksInTurn);
  if (arguments.element_mask != nullptr) {
    constexpr int kThreads = Compression<kHeadDim, true>::kThreads;
    compress_kernel<kHeadDim, Compression, true><<<grid, kThreads, 0, stream>>>({arguments, plan});
  } else {
    constexpr int kThreads = Compression<kHeadDim, false>::kThreads;
    compress_kernel<kHeadDim, Compression, false><<<grid, kThreads, 0, stream>>>({arguments, plan});
  }
}

}  // namespace

Status compress_blocks(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  const bool keys = arguments.operand == KvOperand::keys;
  if (arguments.head_dim == 64) {
    keys ? launch_compression<64, KeyCompression>(arguments, plan, stream)
         : launch_compression<64, ValueCompression>(arguments, plan, stream);
  } else {
    keys ? launch_compression<128, KeyCompression>(arguments, plan, stream)
         : launch_compression<128, ValueCompression>(arguments, plan, stream);
  }
  return launch_status();
}

Status compute_pruning_losses(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  const dim3 grid = grid_of(arguments, arguments.most_blocks < kLossBlocks ? arguments.most_blocks : kLossBlocks);
  if (arguments.dtype == DType::f16) {
    loss_kernel<__half><<<grid, kLossThreads, 0, stream>>>({arguments, plan});
  } else {
    loss_kernel<__nv_bfloat16><<<grid, kLossThreads, 0, stream>>>({arguments, plan});
  }
  return launch_status();
}

Status move_blocks(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  const dim3 grid = grid_of(arguments, arguments.most_blocks < kLossBlocks ? arguments.most_blocks : kLossBlocks);
  move_kernel<<<grid, kMoveThreads, 0, stream>>>({arguments, plan});
  return launch_status();
}

Status enqueue_compress_24(const Compress24Arguments& arguments, void* workspace, FaultSink faults,
                           cudaStream_t stream) {
  const PruningPlan plan = pruning_plan(arguments, workspace);
  Status status = plan_whole_prunings(arguments, plan, faults, stream);
  if (status.ok()) status = compute_pruning_losses(arguments, plan, stream);
  if (status.ok()) status = plan_ranked_prunings(arguments, plan, stream);
  if (status.ok()) status = compress_blocks(arguments, plan, stream);
  if (status.ok()) status = move_blocks(arguments, plan, stream);
  return status;
}

Status compress_24_cuda(const Compress24Arguments& arguments, ExecutionContext& context) {
  if (arguments.pruning_count == 0 || arguments.most_blocks == 0) return Status::success();
  void* workspace = context.queue->workspace(pruning_plan_bytes(arguments));
  if (workspace == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for a plan of the prunings");
  return enqueue_compress_24(arguments, workspace, context.faults, stream_of(context));
}

}  // namespace kv
