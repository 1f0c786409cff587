// What the kernels that sort sub-vectors of four dims into cells know of them, and of a kv head's index. Device code.
#pragma once

#include "kernels/encode-keys/encode-keys.cuda.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv::cuda::cells {

constexpr int kDims = 4;
constexpr int kMostTreeLeaves = kMostCentroids / kLeafCentroids;
constexpr uint16_t kNone = 0xffff;
constexpr uint32_t kAll = 0xffffffffu;

struct Cells {
  EncodeKeysArguments a;
  int levels;
  bool aligned;      // a sub-vector of 16-bit elements may be loaded at once
  int run;           // copies that a thread block sorts at once
  uint32_t* counts;  // [kv_head, leaf]
  uint32_t* bounds;  // [kv_head, leaf, most of x | most of -x, dim], as orders; 0 is below all
  uint32_t* ended;   // how many places leaves have taken
  uint32_t* starts;  // [kv_head, leaf]
  uint32_t* ranks;   // [copy, token, group]: place in the leaf
  uint32_t* order;   // the numbers of sub-vectors, leaf after leaf
  uint16_t* codes;   // [copy, token, group]: leaves, then codes; kNone where no centroid is near

  __device__ int leaves() const { return 1 << levels; }
  __device__ int of_copy() const { return kCodedBlockTokens * a.groups(); }
};

__device__ inline uint32_t order_of_float(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float float_of_order(uint32_t order) {
  return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

// The index of a kv head's book.
struct Tree {
  const uint4* boxes;
  const uint16_t* numbers;
  const uint2* centroids;  // in the order of leaves
  int count;
  int levels;
  bool sound;

  __device__ Tree(const Cells& s, int head) : count(s.a.centroid_count), levels(s.levels) {
    const IndexShape shape(count, kDims);
    const uint8_t* index = s.a.index + head * shape.bytes();
    boxes = reinterpret_cast<const uint4*>(index + kIndexHeaderBytes);
    numbers = reinterpret_cast<const uint16_t*>(index + shape.second());
    centroids = reinterpret_cast<const uint2*>(index + shape.third());
    sound = reinterpret_cast<const IndexHeader*>(index)->levels == levels;
  }

  __device__ int place(int leaf) const { return count * leaf >> levels; }
  __device__ int number(int of_place) const { return min(static_cast<int>(__ldg(numbers + of_place)), count - 1); }
};

__device__ inline void unpack(uint2 halves, float (&c)[kDims]) {
  const float2 low = floats(halves.x), high = floats(halves.y);
  c[0] = low.x, c[1] = low.y, c[2] = high.x, c[3] = high.y;
}

// Where a sub-vector lies.
struct Place {
  int copy;
  int token;
  int group;

  __device__ Place(const Cells& s, uint32_t number) {
    const auto groups = static_cast<uint32_t>(s.a.groups());
    const uint32_t row = number / groups;
    group = static_cast<int>(number - row * groups);
    copy = static_cast<int>(row / kCodedBlockTokens);
    token = static_cast<int>(row % kCodedBlockTokens);
  }
};

template <class T>
__device__ void load_sub_vector(const Cells& s, int head, uint32_t number, float (&x)[kDims]) {
  const EncodeKeysArguments& a = s.a;
  const Place place(s, number);
  const T* from = static_cast<const T*>(a.keys) + a.from[place.copy] * a.block_stride + place.token * a.token_stride + place.group * kDims;
  if (sizeof(T) == 2 && s.aligned) {
    T own[kDims];
    *reinterpret_cast<uint2*>(own) = __ldg(reinterpret_cast<const uint2*>(from));
#pragma unroll
    for (int d = 0; d < kDims; ++d) x[d] = to_float(own[d]);
  } else {
#pragma unroll
    for (int d = 0; d < kDims; ++d) x[d] = to_float(from[d]);
  }
  if (a.channel_scale == nullptr) return;
  const float* scales = a.channel_scale + int64_t{head} * a.head_dim + place.group * kDims;
#pragma unroll
  for (int d = 0; d < kDims; ++d) x[d] = __fdiv_rn(x[d], scales[d]);
}

}  // namespace kv::cuda::cells
