// How a warp gets the words of coded blocks, chunk by chunk. Device code.
#pragma once

#include "ptx/bulk-copy.cuda.h"
#include "ptx/mbarrier.cuda.h"
#include "shared/coded-keys/coded-keys.h"
#include "shared/cuda/elements.cuda.h"

namespace kv::cuda {

// On Hopper, chunks of books of two dims come into shared memory by TMA, some ahead. Loads would take cycles of the pipe that
// look-ups need. Books of four dims leave no room for that.
template <int kSubDim, int kBits, int kChunks>
class ChunkWords {
  static constexpr bool kCopied = kSubDim == 2;
  static constexpr int kAhead = kChunks < 2 ? 1 : 2;
  static constexpr int kStages = kAhead + 1;
  static constexpr int kChunkWords = kStreamCodes * kBits;
  static constexpr uint32_t kChunkBytes = 4 * kChunkWords;

 public:
  // Of shared memory, for a warp.
  static constexpr int kBytes = kCopied ? kStages * static_cast<int>(kChunkBytes) + 128 : 0;

  // `memory` is that of all warps, behind a multiple of 128 bytes. A barrier of the thread block must follow.
  __device__ explicit ChunkWords(unsigned char* memory) {
    if constexpr (copies()) {
      unsigned char* own = memory + threadIdx.x / kWarp * kBytes;
      stages_ = reinterpret_cast<uint32_t*>(own);
      barriers_ = reinterpret_cast<uint64_t*>(own + kStages * kChunkBytes);
      if (lane() != 0) return;
      for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(barriers_ + stage, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // Asks for the first chunks of a block, where none was asked for.
  __device__ void begin(const uint32_t* block) {
    if constexpr (copies()) {
      for (int chunk = 0; chunk < kAhead; ++chunk) ask(block + chunk * kChunkWords, (stage_ + chunk) % kStages);
    }
  }

  // Gives the lane's words of a chunk, of blocks that follow each other: `next`, or null, comes after this one.
  __device__ void load(const uint32_t* block, int chunk, const uint32_t* next, uint32_t (&words)[kBits]) {
    if constexpr (copies()) {
      const int ahead = chunk + kAhead;
      const int free = stage_ == 0 ? kStages - 1 : stage_ - 1;
      if (ahead < kChunks) ask(block + ahead * kChunkWords, free);
      else if (next != nullptr) ask(next + (ahead - kChunks) * kChunkWords, free);
      ptx::mbarrier_wait(barriers_ + stage_, parity_);
#pragma unroll
      for (int i = 0; i < kBits; ++i) words[i] = stages_[stage_ * kChunkWords + i * kWarp + lane()];
      __syncwarp();  // the chunk after the next comes here
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
      parity_ ^= stage_ == 0 ? 1 : 0;
    } else {
#pragma unroll
      for (int i = 0; i < kBits; ++i) {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words[i]) : "l"(block + chunk * kChunkWords + i * kWarp + lane()));
      }
    }
  }

 private:
  static __device__ constexpr bool copies() { return kCopied && ptx::has_bulk_copy(); }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  __device__ void ask(const uint32_t* chunk, int stage) const {
    if (lane() != 0) return;
    ptx::mbarrier_arrive_expect_bytes(barriers_ + stage, kChunkBytes);
    ptx::bulk_copy(stages_ + stage * kChunkWords, chunk, kChunkBytes, barriers_ + stage);
  }

  uint32_t* stages_ = nullptr;
  uint64_t* barriers_ = nullptr;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace kv::cuda
