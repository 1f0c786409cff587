// The tokens of lists by chunks. Device code.
#pragma once

#include "kernels/select-by-mass/select-by-mass-state.cuda.h"

namespace kv {

// The tokens of a list in a chunk, by their place in it.
class ChunkTokens {
 public:
  // Returns how many there are. All threads call it.
  __device__ int find(const List& list, int chunk) {
    static_assert(kChunkWords == kThreads, "each thread has a word");
    uint32_t word = list.words()[chunk * kChunkWords + static_cast<int>(threadIdx.x)];
    int place = 0;
    int count = 0;
    Scan(storage_).ExclusiveSum(__popc(word), place, count);
    for (; word != 0; word &= word - 1) {
      places_[place++] = static_cast<uint16_t>(static_cast<int>(threadIdx.x) * kWarp + __ffs(static_cast<int>(word)) - 1);
    }
    __syncthreads();
    return count;
  }
  __device__ int token(int chunk, int i) const { return chunk * kChunk + places_[i]; }

 private:
  using Scan = cub::BlockScan<int, kThreads>;
  typename Scan::TempStorage storage_;
  uint16_t places_[kChunk];
};

// The tokens of a list in the chunks before `chunk`, and in all; every thread gets them.
struct ChunkSums {
  int before;
  int all;

  __device__ ChunkSums(const List& list, int chunk) {
    __shared__ int sums[2];
    const int chunks = (list.state.tokens + kChunk - 1) / kChunk;
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    int own_before = 0;
    int own = 0;
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
      const int count = __ldcg(list.chunk_counts() + i);
      own += count;
      if (i < chunk) own_before += count;
    }
    if (own_before != 0) atomicAdd(&sums[0], own_before);
    if (own != 0) atomicAdd(&sums[1], own);
    __syncthreads();
    before = sums[0];
    all = sums[1];
  }
};

}  // namespace kv
