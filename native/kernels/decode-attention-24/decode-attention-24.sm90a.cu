// Decode attention over 2:4 blocks in which TMA copies the pieces. A sparse block takes two bulk copies. Half of a
// dense block takes one tensor copy for each panel, which swizzles it.
#include <algorithm>

#include "kernels/decode-attention-24/decode-attention-24-launch.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/bulk-copy.cuda.h"
#include "ptx/mbarrier.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "runtime/tensor-map.cuda.h"

namespace kv::sm90a {
namespace {

template <typename Element, int kHeadDim, int kRows>
class TmaCopies {
 public:
  static constexpr int kMostSharedBytes = 227 * 1024;
  static constexpr int kWarps = 8;
  // More slots only make the memory's queues longer.
  static constexpr int kSlots = kHeadDim == 128 ? 2 : 4;

  struct Maps {
    CUtensorMap keys;
    CUtensorMap values;
  };
  struct Shared {
    uint64_t landed[kSlots];
  };

  static Status describe(const Attention24Arguments& arguments, Maps* maps) {
    TensorBox pool;
    pool.dtype = arguments.cache_dtype;
    pool.extents = {kHeadDim, kBlock24Tokens, std::max(1, arguments.block_count)};
    pool.strides = {arguments.token_stride, arguments.block_stride};
    pool.box = {64, kHalfBlock24Tokens, 1};
    pool.data = arguments.keys;
    const Status status = encode_tensor_map(pool, &maps->keys);
    if (!status.ok()) return status;
    pool.data = arguments.values;
    return encode_tensor_map(pool, &maps->values);
  }

  __device__ TmaCopies(const DecodeParameters24<Maps>& parameters, Shared& shared, bool leads)
      : maps_(parameters.maps), shared_(shared), leads_(leads) {
    if (leads_) {
      for (uint64_t& landed : shared.landed) ptx::mbarrier_init(&landed, 1);
      ptx::fence_mbarrier_init();
      ptx::prefetch_tensor_map(&maps_.keys);
      ptx::prefetch_tensor_map(&maps_.values);
    }
    __syncwarp();
  }

  __device__ void start_sparse(const SparseBlocks24& blocks, int block, void* piece, RingPosition<kSlots> at) {
    if (!leads_) return;
    constexpr int kNonZeroBytes = sparse_block_elements(kHeadDim) * sizeof(Element);
    constexpr int kMetadataBytes = sparse_block_words(kHeadDim) * sizeof(uint32_t);
    uint64_t* landed = &shared_.landed[at.stage];
    ptx::mbarrier_arrive_expect_bytes(landed, kNonZeroBytes + kMetadataBytes);
    auto* to = static_cast<unsigned char*>(piece);
    ptx::bulk_copy(to, static_cast<const unsigned char*>(blocks.non_zeros) + int64_t{block} * kNonZeroBytes,
                   kNonZeroBytes, landed, policy_);
    ptx::bulk_copy(to + kNonZeroBytes, blocks.metadata + block * sparse_block_words(kHeadDim), kMetadataBytes, landed,
                   policy_);
  }

  __device__ void start_dense_half(bool of_keys, int block, int half, Piece24<Element, kHeadDim>* piece,
                                   RingPosition<kSlots> at) {
    if (!leads_) return;
    uint64_t* landed = &shared_.landed[at.stage];
    ptx::mbarrier_arrive_expect_bytes(landed, sizeof(piece->dense_half));
    for (int panel = 0; panel < kHeadDim / 64; ++panel) {
      ptx::tensor_copy(piece->dense_half.panels[panel], of_keys ? &maps_.keys : &maps_.values, 64 * panel,
                       half * kHalfBlock24Tokens, block, landed, policy_);
    }
  }

  __device__ void start_nothing() {}

  __device__ void wait(RingPosition<kSlots> at) { ptx::mbarrier_wait(&shared_.landed[at.stage], at.parity); }

  __device__ void release_writes() { ptx::fence_async_proxy(); }

 private:
  const Maps& maps_;
  Shared& shared_;
  const bool leads_;
  const uint64_t policy_ = ptx::evict_first_policy();
};

}  // namespace

Status decode_attention_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream) {
  return launch_decode_24<TmaCopies>(arguments, counters, workspace, faults, stream);
}

}  // namespace kv::sm90a
