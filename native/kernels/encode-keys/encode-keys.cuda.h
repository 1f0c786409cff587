// What the CUDA kernels of encode-keys share.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/encode-keys/encode-keys.h"
#ifdef __CUDACC__
#include "shared/coded-keys/coded-keys.cuda.h"
#endif

namespace kv::cuda {

// Many sub-vectors of four dims over a book of all groups that has an index.
bool fits_encode_keys_cells(const EncodeKeysArguments& arguments);

// Takes what fits_encode_keys_cells accepts.
Status encode_keys_cells(const EncodeKeysArguments& arguments, ExecutionContext& context);

#ifdef __CUDACC__
__device__ inline float2 floats(uint32_t halves) { return __half22float2(*reinterpret_cast<const __half2*>(&halves)); }

__device__ inline float square(float x, float centroid) {
  const float away = __fsub_rn(x, centroid);
  return __fmul_rn(away, away);
}

// Of a sub-vector of four dims from a centroid, rounded as on the CPU.
__device__ inline float distance_of_four(const float* x, uint2 halves) {
  const float2 low = floats(halves.x), high = floats(halves.y);
  const float half = __fadd_rn(square(x[0], low.x), square(x[1], low.y));
  return __fadd_rn(__fadd_rn(half, square(x[2], high.x)), square(x[3], high.y));
}

__device__ inline void clear_spoilt(const EncodeKeysArguments& a, int copy) {
  *reinterpret_cast<uint2*>(a.spoilt(a.to[copy])) = make_uint2(0, 0);
}

// Writes the codes of a stream, in the order of their places.
class StreamWriter {
 public:
  // `lane` is the stream's number in its chunk.
  __device__ StreamWriter(const EncodeKeysArguments& a, int copy, int chunk, int lane, int streams)
      : words_(a.block(a.to[copy]) + chunk_offset(chunk, a.code_bits) + lane), spoilt_(a.spoilt(a.to[copy])), step_(streams), bits_(a.code_bits) {}

  // A code below 0 is of a sub-vector that no centroid is near to.
  __device__ void write(int code, int token) {
    if (code < 0) {
      code = 0;
      atomicOr(spoilt_ + token / 32, 1u << token % 32);
    }
    pending_ |= static_cast<uint64_t>(code) << filled_;
    filled_ += bits_;
    if (filled_ < 32) return;
    *words_ = static_cast<uint32_t>(pending_);
    words_ += step_;
    pending_ >>= 32;
    filled_ -= 32;
  }

 private:
  uint32_t* words_;
  uint32_t* spoilt_;
  int step_;
  int bits_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};
#endif

}  // namespace kv::cuda
