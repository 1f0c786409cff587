// Lists the centroids that can be the nearest of a cell's sub-vectors, and finds the nearest among them on tensor cores. Device
// code.
#pragma once

#include <cfloat>

#include "kernels/encode-keys/encode-keys-cells.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/mma.cuda.h"

namespace kv::cuda::cells {

constexpr int kSearchThreads = 256;
constexpr int kMostListed = 2048;  // centroids of a cell
constexpr int kChunk = 32;         // of them are multiplied at a time, eight by each lane
constexpr uint32_t kChunkBits = kMostListed / kChunk - 1;
constexpr int kWitnesses = 32;
constexpr int kFirstWitnesses = 8;
constexpr float kLowest = -1e38f;      // below all products
constexpr float kMostInHalf = 60000;   // of a dim

// The centroids that can be the nearest of a sub-vector of a cell.
struct List {
  uint2 halves[kMostListed];
  float products[kMostListed];  // -|c|^2 / 2
  uint16_t numbers[kMostListed];
  float4 witnesses[kWitnesses];  // relative to the middle of the cell
  float squares[kWitnesses];
  int count;
  uint32_t most_square;  // the largest |c|^2, as bits
};

// The box of a cell's sub-vectors.
struct Box {
  float middle[kDims];
  float half[kDims];
  float square;  // of half

  __device__ explicit Box(const uint32_t* bounds) : square(0) {
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      const float high = float_of_order(bounds[d]), low = -float_of_order(bounds[kDims + d]);
      middle[d] = 0.5f * low + 0.5f * high;
      half[d] = fmaxf(high - middle[d], middle[d] - low) * 1.000001f;
      square += half[d] * half[d];
    }
  }

  // The square of the least distance from another box, or from a point.
  __device__ float least(const float (&low)[kDims], const float (&high)[kDims]) const {
    float sum = 0;
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      const float away = fmaxf(fmaxf(low[d] - middle[d], middle[d] - high[d]) - half[d], 0.0f);
      sum += away * away;
    }
    return sum;
  }
};

// A centroid, relative to the middle of the cell.
struct Moved {
  float c[kDims];
  float square = 0;

  __device__ Moved(const Box& box, uint2 halves) {
    unpack(halves, c);
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      c[d] -= box.middle[d];
      square += c[d] * c[d];
    }
  }

  // Whether a witness is nearer wherever in the box a sub-vector lies, whatever rounding does to distances.
  __device__ bool ruled_out(const Box& box, const float4& witness, float of_witness) const {
    float advantage = fabsf(c[0] - witness.x) * box.half[0];
    advantage = fmaf(fabsf(c[1] - witness.y), box.half[1], advantage);
    advantage = fmaf(fabsf(c[2] - witness.z), box.half[2], advantage);
    advantage = fmaf(fabsf(c[3] - witness.w), box.half[3], advantage);
    return square - of_witness - 2 * advantage > 1e-5f * (square + of_witness + box.square) + 1e-37f;
  }
};

// Adds those lanes' entries to the list, as far as there is room. All lanes of the warp call it.
__device__ inline void add(List& list, bool kept, uint2 halves, float product, int number) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t lanes = __ballot_sync(kAll, kept);
  if (lanes == 0) return;
  int first = 0;
  if (lane == 0) first = atomicAdd(&list.count, __popc(lanes));
  const int to = __shfl_sync(kAll, first, 0) + __popc(lanes & ((1u << lane) - 1));
  if (!kept || to >= kMostListed) return;
  list.halves[to] = halves;
  list.products[to] = product;
  list.numbers[to] = static_cast<uint16_t>(number);
}

// All threads of the block. The list's count is beyond its room if there are too many.
__device__ inline void make_list(List& list, const Tree& tree, const Box& box, int leaf) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  // Witnesses are the leaf's own centroids, and then those of its neighbours in the tree.
  const int neighbours = tree.place((leaf | 3) + 1) - tree.place(leaf & ~3);
  const int place = tree.place(leaf & ~3) + (tree.place(leaf) - tree.place(leaf & ~3) + lane) % neighbours;
  const Moved witness(box, __ldg(tree.centroids + place));
  float furthest = 0;
#pragma unroll
  for (int d = 0; d < kDims; ++d) {
    const float away = fabsf(witness.c[d]) + box.half[d];
    furthest += away * away;
  }
  const float nearest = __uint_as_float(__reduce_min_sync(kAll, __float_as_uint(furthest))) * 1.00001f;
  if (warp == 0) {
    list.witnesses[lane] = make_float4(witness.c[0], witness.c[1], witness.c[2], witness.c[3]);
    list.squares[lane] = witness.square;
  }
  if (thread == 0) list.count = 0, list.most_square = 0;
  __syncthreads();
  const int leaves = 1 << tree.levels;
  for (int first = warp * kWarp; first < leaves; first += kSearchThreads) {
    const uint4 halves = __ldg(tree.boxes + leaves - 1 + first + lane);
    float low[kDims], high[kDims];
    unpack(make_uint2(halves.x, halves.y), low);
    unpack(make_uint2(halves.z, halves.w), high);
    uint32_t near = __ballot_sync(kAll, !(box.least(low, high) > nearest));
    while (near != 0) {
      int own = -1;
#pragma unroll
      for (int i = 0; i < kWarp / kLeafCentroids; ++i) {
        if (near == 0) break;
        if (lane / kLeafCentroids == i) own = first + __ffs(static_cast<int>(near)) - 1;
        near &= near - 1;
      }
      const int from = own < 0 ? 0 : tree.place(own) + lane % kLeafCentroids;
      bool kept = own >= 0 && from < tree.place(own + 1);
      const uint2 centroid = __ldg(tree.centroids + (kept ? from : 0));
      const Moved moved(box, centroid);
      float c[kDims];
      unpack(centroid, c);
      kept = kept && !(box.least(c, c) > nearest);
      for (int w = 0; w < kFirstWitnesses && __any_sync(kAll, kept); w += 2) {
        kept = kept && !moved.ruled_out(box, list.witnesses[w], list.squares[w]) &&
               !moved.ruled_out(box, list.witnesses[w + 1], list.squares[w + 1]);
      }
      const float square = c[0] * c[0] + c[1] * c[1] + c[2] * c[2] + c[3] * c[3];
      add(list, kept, centroid, -0.5f * square, kept ? tree.number(from) : 0);
    }
  }
  __syncthreads();
  const int all = list.count;
  if (all > kMostListed) return;
  __syncthreads();
  if (thread == 0) list.count = 0;
  for (int first = 0; first < all; first += kSearchThreads) {
    const int own = first + thread;
    bool kept = own < all;
    const uint2 centroid = list.halves[kept ? own : 0];
    const float product = list.products[kept ? own : 0];
    const int number = list.numbers[kept ? own : 0];
    __syncthreads();
    const Moved moved(box, centroid);
#pragma unroll 4
    for (int w = kFirstWitnesses; w < kWitnesses; ++w) kept = kept && !moved.ruled_out(box, list.witnesses[w], list.squares[w]);
    add(list, kept, centroid, product, number);
    const uint32_t square = __reduce_max_sync(kAll, kept ? __float_as_uint(-2 * product) : 0u);
    if (lane == 0) atomicMax(&list.most_square, square);
    __syncthreads();
  }
  const int count = list.count;
  const int padded = (count + kChunk - 1) / kChunk * kChunk;
  for (int i = count + thread; i < padded; i += kSearchThreads) {
    list.halves[i] = make_uint2(0, 0);
    list.products[i] = kLowest;
  }
  __syncthreads();
}

// The nearest centroid so far. None is infinitely far.
struct Nearest {
  float distance = FLT_MAX;
  int code = INT32_MAX;

  __device__ void compare(float far, int number) {
    if (far < distance || (far == distance && number < code)) distance = far, code = number;
  }
};

// The warp compares the sub-vector of one of its lanes with `count` centroids. Every lane gets the code, or kNone.
template <class Centroid, class Number>
__device__ int compare_all(const float (&of_lane)[kDims], int owner, int count, Centroid centroid, Number number) {
  float x[kDims];
#pragma unroll
  for (int d = 0; d < kDims; ++d) x[d] = __shfl_sync(kAll, of_lane[d], owner);
  Nearest nearest;
  for (int c = static_cast<int>(threadIdx.x) % kWarp; c < count; c += kWarp) nearest.compare(distance_of_four(x, centroid(c)), number(c));
  const uint32_t least = __reduce_min_sync(kAll, __float_as_uint(nearest.distance));
  const int code = __reduce_min_sync(kAll, __float_as_uint(nearest.distance) == least ? nearest.code : INT32_MAX);
  return code == INT32_MAX ? kNone : code;
}

// The best two products of a row, of eight centroids each.
struct BestTwo {
  float first = kLowest * 2;
  float second = kLowest * 2;

  __device__ void add(float own) {
    second = fmaxf(second, fminf(first, own));
    first = fmaxf(first, own);
  }
};

// A warp finds the codes of 32 sub-vectors, one of each lane.
__device__ inline int search(const List& list, const Tree& tree, const float (&x)[kDims]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int octet = lane / 4, quad = lane % 4;
  // A row of the first operand has the dims as f16, and then what that leaves of them.
  uint32_t parts[4];
  float rest[kDims];
  float square = 0;
  bool fits = true;
#pragma unroll
  for (int d = 0; d < kDims; ++d) {
    rest[d] = x[d] - __half2float(__float2half_rn(x[d]));
    square = fmaf(x[d], x[d], square);
    fits = fits && fabsf(x[d]) < kMostInHalf;
  }
  parts[0] = ptx::pack<__half>(x[0], x[1]), parts[1] = ptx::pack<__half>(x[2], x[3]);
  parts[2] = ptx::pack<__half>(rest[0], rest[1]), parts[3] = ptx::pack<__half>(rest[2], rest[3]);
  uint32_t rows[4];
  float offsets[4];
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    rows[row] = 0;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint32_t own = __shfl_sync(kAll, parts[part], 8 * row + octet);
      if (quad == part) rows[row] = own;
    }
    offsets[row] = __shfl_sync(kAll, -0.5f * square, 8 * row + octet);
  }
  BestTwo best[4];
  const int chunks = (list.count + kChunk - 1) / kChunk;
  const auto* halves = reinterpret_cast<const uint32_t*>(list.halves) + 2 * octet + quad % 2;
  const float* products = list.products + 2 * quad;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    float sums[4][2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t b = halves[2 * (chunk * kChunk + 8 * i)];
      const float2 own = *reinterpret_cast<const float2*>(products + chunk * kChunk + 8 * i);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) ptx::mma_m16n8k8_halves(sums[i][tile], rows[2 * tile], rows[2 * tile + 1], b, own);
    }
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      float most = fmaxf(sums[0][row / 2][row % 2 * 2], sums[0][row / 2][row % 2 * 2 + 1]);
#pragma unroll
      for (int i = 1; i < 4; ++i) most = fmaxf(most, fmaxf(sums[i][row / 2][row % 2 * 2], sums[i][row / 2][row % 2 * 2 + 1]));
      best[row].add(__uint_as_float((__float_as_uint(most + offsets[row]) & ~kChunkBits) | static_cast<uint32_t>(chunk)));
    }
  }
  // Each lane goes on with its own sub-vector: row lane / 8 of octet lane % 8.
  float first = 0, second = 0;
  int owner = 0;
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const float own = best[row].first;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(kAll, best[row].first, step);
      best[row].second = fmaxf(best[row].second, __shfl_xor_sync(kAll, best[row].second, step));
      best[row].add(other);
    }
    const uint32_t owners = __ballot_sync(kAll, own == best[row].first);
    const float of_row_first = __shfl_sync(kAll, best[row].first, lane % 8 * 4);
    const float of_row_second = __shfl_sync(kAll, best[row].second, lane % 8 * 4);
    if (lane / 8 == row) {
      first = of_row_first;
      second = of_row_second;
      owner = __ffs(static_cast<int>(owners >> lane % 8 * 4 & 15)) - 1;
    }
  }
  // Products are off by rounding, and by the bits of their places.
  const float most_square = __uint_as_float(list.most_square);
  const float error = 0x1p-18f * (square + most_square) + 0x1p-22f * sqrtf(most_square) + 0x1p-15f * fabsf(second);
  const bool certain = fits && first - second > error;
  int code = kNone;
  if (certain) {
    const int chunk = static_cast<int>(__float_as_uint(first) & kChunkBits);
    Nearest nearest;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int c = chunk * kChunk + i / 2 * 8 + 2 * owner + i % 2;
      if (c < list.count) nearest.compare(distance_of_four(x, list.halves[c]), list.numbers[c]);
    }
    if (nearest.code != INT32_MAX) code = nearest.code;
  }
  for (uint32_t left = __ballot_sync(kAll, !certain); left != 0; left &= left - 1) {
    const int lane_left = __ffs(static_cast<int>(left)) - 1;
    const int found = compare_all(x, lane_left, list.count, [&](int c) { return list.halves[c]; }, [&](int c) { return list.numbers[c]; });
    if (lane == lane_left) code = found;
  }
  return code;
}

}  // namespace kv::cuda::cells
