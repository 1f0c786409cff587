// Reads dense blocks of keys or values, 16 bytes in each lane, prunes them in registers, and writes 2:4 blocks.
// compress-24-plan.cuda.cu decides which blocks. What is written leaves L2 first, and not what is read: so memory gets
// writes early and many at a time.
#include <limits>
#include <string>

#include "kernels/compress-24/compress-24-group.cuda.h"
#include "kernels/compress-24/compress-24.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

// Threads of a thread block, which compresses one block. Each thread has eight rows of 16 bytes.
constexpr int threads_of(int head_dim) { return head_dim; }

struct Parameters {
  Compress24Arguments arguments;
  PruningPlan plan;
};

// The metadata of a block, collected byte by byte: a thread has eight of the sixteen bits of a meta16.
template <int kHeadDim>
class MetadataBytes {
 public:
  // Writes half `half` of the meta16 at `place`.
  __device__ void put(Meta16Place place, int half, uint32_t byte) {
    const int word = place.word + place.word / 32 * kPad;
    reinterpret_cast<uint8_t*>(words_)[4 * word + place.shift / 8 + half] = static_cast<uint8_t>(byte);
  }

  __device__ void write(uint32_t* metadata) const {
    const int word = 4 * threadIdx.x;
    if (word >= kWords) return;
    __stcs(reinterpret_cast<uint4*>(metadata + word), *reinterpret_cast<const uint4*>(words_ + word + word / 32 * kPad));
  }

 private:
  static constexpr int kWords = static_cast<int>(sparse_block_words(kHeadDim));
  static constexpr int kPad = 4;  // unused words after each 32, which avoid bank conflicts

  alignas(16) uint32_t words_[kWords / 32 * (32 + kPad)];
};

// Each thread compresses eight dims of every eighth token.
template <int kHeadDim, bool kMasked>
struct KeyCompression {
  static __device__ void run(const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros,
                             MetadataBytes<kHeadDim>& metadata) {
    const int dim = threadIdx.x % (kHeadDim / 8) * 8;
    const int first_token = threadIdx.x / (kHeadDim / 8);
    const int first = first_token * kHeadDim + dim;
    uint4 rows[8];
    uint2 masks[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[i] = __ldcg(reinterpret_cast<const uint4*>(dense + first) + i * kHeadDim);
      if (kMasked) masks[i] = reinterpret_cast<const uint2*>(mask + first)[i * kHeadDim];
    }
    auto* to = reinterpret_cast<uint2*>(non_zeros + key_non_zero(first_token, dim / 2, kHeadDim));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const GroupPair pair = key_pair(rows[i]);
      const KeptPair kept = kMasked ? keep_masked(pair, key_mask(masks[i])) : keep_largest(pair);
      __stcs(to + i * kHeadDim, uint2{low_halves(kept.first, kept.second), high_halves(kept.first, kept.second)});
      metadata.put(key_meta16(first_token + 8 * i, dim / 16, kHeadDim), dim / 8 % 2, kept.nibbles | kept.nibbles >> 12);
    }
  }
};

// Each thread compresses eight dims of eight tokens.
template <int kHeadDim, bool kMasked>
struct ValueCompression {
  static __device__ void run(const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros,
                             MetadataBytes<kHeadDim>& metadata) {
    const int dim = threadIdx.x % (kHeadDim / 8) * 8;
    const int octet = threadIdx.x / (kHeadDim / 8);  // which eight of the block's tokens
    const int first = 8 * octet * kHeadDim + dim;
    uint4 rows[2][4];
    uint2 masks[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[i / 4][i % 4] = __ldcg(reinterpret_cast<const uint4*>(dense + first) + i * kHeadDim / 8);
      if (kMasked) masks[i / 4][i % 4] = reinterpret_cast<const uint2*>(mask + first)[i * kHeadDim / 8];
    }
    uint32_t nibbles[4] = {};  // each holds two dims
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      KeptPair kept[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const GroupPair pair = value_pair(rows[group], i);
        kept[i] = kMasked ? keep_masked(pair, value_mask(masks[group], i)) : keep_largest(pair);
        nibbles[i] |= kept[i].nibbles << 4 * group;
      }
      const int row = 4 * octet + 2 * group;
      __stcs(reinterpret_cast<uint4*>(non_zeros + value_non_zero(row, dim)),
             uint4{kept[0].first, kept[1].first, kept[2].first, kept[3].first});
      __stcs(reinterpret_cast<uint4*>(non_zeros + value_non_zero(row + 1, dim)),
             uint4{kept[0].second, kept[1].second, kept[2].second, kept[3].second});
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      metadata.put(value_meta16(dim + i, octet / 2), octet % 2, nibbles[i / 2] >> i % 2 * 16);
    }
  }
};

template <int kHeadDim>
__device__ void copy_block(const uint16_t* from, uint16_t* to) {
  constexpr int kChunks = kBlock24Tokens * kHeadDim / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < kChunks; i += threads_of(kHeadDim)) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

template <int kHeadDim, template <int, bool> class Compression, bool kMasked>
__global__ void __launch_bounds__(threads_of(kHeadDim))
    compress_kernel(const __grid_constant__ Parameters parameters) {
  __shared__ MetadataBytes<kHeadDim> metadata;
  const Compress24Arguments& arguments = parameters.arguments;
  ptx::follow_previous_kernel();
  const BlockPlan plan = parameters.plan.blocks[blockIdx.x];
  if (is_dense(plan.sparse)) return;
  const int64_t sparse = block_number(plan.sparse);
  uint16_t* dense = dense_block(arguments, plan.dense);
  const uint8_t* mask = kMasked ? mask_of(arguments, arguments.prunings[blockIdx.x / arguments.most_blocks]) : nullptr;
  uint16_t* non_zeros = static_cast<uint16_t*>(arguments.non_zeros) + sparse * sparse_block_elements(kHeadDim);
  Compression<kHeadDim, kMasked>::run(dense, mask, non_zeros, metadata);
  __syncthreads();
  metadata.write(arguments.metadata + sparse * sparse_block_words(kHeadDim));
  // All threads have read the dense block by now, so it may be overwritten.
  if (plan.refill >= 0) copy_block<kHeadDim>(dense_block(arguments, plan.refill), dense);
}

template <int kHeadDim, template <int, bool> class Compression>
Status launch_compression(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(planned_blocks(arguments)));
  const auto kernel = arguments.element_mask != nullptr ? compress_kernel<kHeadDim, Compression, true>
                                                        : compress_kernel<kHeadDim, Compression, false>;
  return launch_overlapped(kernel, grid, threads_of(kHeadDim), 0, stream, Parameters{arguments, plan});
}

Status compress_blocks(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  const bool keys = arguments.operand == KvOperand::keys;
  if (arguments.head_dim == 64) {
    return keys ? launch_compression<64, KeyCompression>(arguments, plan, stream)
                : launch_compression<64, ValueCompression>(arguments, plan, stream);
  }
  return keys ? launch_compression<128, KeyCompression>(arguments, plan, stream)
              : launch_compression<128, ValueCompression>(arguments, plan, stream);
}

}  // namespace

Status enqueue_compress_24(const Compress24Arguments& arguments, void* counters, void* workspace, FaultSink faults,
                           cudaStream_t stream) {
  const PruningPlan plan = pruning_plan(arguments, counters, workspace);
  const Status status = plan_prunings(arguments, plan, faults, stream);
  return status.ok() ? compress_blocks(arguments, plan, stream) : status;
}

Status compress_24_cuda(const Compress24Arguments& arguments, ExecutionContext& context) {
  if (arguments.pruning_count == 0 || arguments.most_blocks == 0) return Status::success();
  constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
  if (planned_blocks(arguments) > kMostBlocks) {
    return Status::failure(StatusCode::capability, std::to_string(arguments.pruning_count) + " prunings of up to " +
                                                       std::to_string(arguments.most_blocks) +
                                                       " blocks were given; CUDA takes " + std::to_string(kMostBlocks) +
                                                       " blocks at once: share the prunings among several calls");
  }
  void* counters = context.zeroed_workspace(pruning_counter_bytes(arguments));
  void* workspace = context.workspace(pruning_plan_bytes(arguments));
  if (counters == nullptr || workspace == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for a plan of the prunings");
  }
  return enqueue_compress_24(arguments, counters, workspace, context.faults(describe_compress_24_fault),
                             stream_of(context));
}

}  // namespace kv
