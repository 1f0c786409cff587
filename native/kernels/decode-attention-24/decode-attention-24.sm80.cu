// Decode attention over 2:4 blocks in which the lanes of each warp copy its pieces.
#include "kernels/decode-attention-24/decode-attention-24-launch.cuda.h"
#include "ptx/async-copy.cuda.h"

namespace kv::sm80 {
namespace {

template <typename Element, int kHeadDim, int kRows>
class ThreadCopies {
 public:
  static constexpr int kMostSharedBytes = 99 * 1024;  // of compute capability 8.9
  static constexpr int kWarps = kRows == 8 ? 4 : 3;
  static constexpr int kSlots = kHeadDim == 128 ? 2 : 4;

  struct Maps {};
  struct Shared {};

  static Status describe(const Attention24Arguments&, Maps*) { return Status::success(); }

  __device__ ThreadCopies(const DecodeParameters24<Maps>& parameters, Shared&, bool)
      : arguments_(parameters.arguments), lane_(threadIdx.x % 32) {}

  __device__ void start_sparse(const SparseBlocks24& blocks, int block, void* piece, RingPosition<kSlots>) {
    constexpr int kNonZeroBytes = sparse_block_elements(kHeadDim) * sizeof(Element);
    constexpr int kMetadataBytes = sparse_block_words(kHeadDim) * sizeof(uint32_t);
    auto* to = static_cast<unsigned char*>(piece);
    copy(to, static_cast<const unsigned char*>(blocks.non_zeros) + int64_t{block} * kNonZeroBytes, kNonZeroBytes);
    copy(to + kNonZeroBytes, blocks.metadata + block * sparse_block_words(kHeadDim), kMetadataBytes);
    ptx::async_copy_commit();
  }

  __device__ void start_dense_half(bool of_keys, int block, int half, Piece24<Element, kHeadDim>* piece,
                                   RingPosition<kSlots>) {
    const auto* from = static_cast<const Element*>(of_keys ? arguments_.keys : arguments_.values) +
                       block * arguments_.block_stride + half * kHalfBlock24Tokens * arguments_.token_stride;
    constexpr int kChunks = kHeadDim / 8;
    for (int i = lane_; i < kHalfBlock24Tokens * kChunks; i += 32) {
      ptx::async_copy_16(const_cast<Element*>(piece->dense_half.chunk(i / kChunks, i % kChunks)),
                         from + i / kChunks * arguments_.token_stride + i % kChunks * 8, true);
    }
    ptx::async_copy_commit();
  }

  // Keeps the number of copy groups equal to the number of pieces.
  __device__ void start_nothing() { ptx::async_copy_commit(); }

  __device__ void wait(RingPosition<kSlots>) {
    ptx::async_copy_wait<kSlots - 1>();
    __syncwarp();
  }

  __device__ void release_writes() {}

 private:
  __device__ void copy(unsigned char* to, const void* from, int bytes) {
    for (int i = lane_ * 16; i < bytes; i += 32 * 16) {
      ptx::async_copy_16(to + i, static_cast<const unsigned char*>(from) + i, true);
    }
  }

  const Attention24Arguments& arguments_;
  const int lane_;
};

}  // namespace

Status decode_attention_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                              FaultSink faults, cudaStream_t stream) {
  return launch_decode_24<ThreadCopies>(arguments, counters, workspace, faults, stream);
}

}  // namespace kv::sm80
