// Encodes many sub-vectors of four dims. They are sorted by the leaf of the index that they lie in. Few centroids can be the
// nearest of any sub-vector of such a cell. A thread block lists them, and its warps compare each with 32 sub-vectors at a
// time, on tensor cores: x c - |c|^2 / 2 is largest for the nearest one.
//
// Of eight centroids at a time only the largest product is kept, with the place of the eight in its lowest bits. The
// distances from the best eight are then computed as on the CPU. Where the second best are closer to them than rounding,
// those from all that are listed are.
#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <cfloat>

#include "kernels/encode-keys/encode-keys.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/mma.cuda.h"
#include "runtime/device.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kDims = 4;
constexpr int kLeastLevels = 5;
constexpr int kMostTreeLeaves = kMostCentroids / kLeafCentroids;
constexpr int kCellThreads = 1024;
constexpr int kOfThread = 16;  // sub-vectors
constexpr int kStartThreads = 256;
constexpr int kCopyThreads = 256;
constexpr int kSearchThreads = 256;
constexpr int kMostListed = 2048;  // centroids of a cell
constexpr int kChunk = 32;         // of them are multiplied at a time, eight by each lane
constexpr uint32_t kChunkBits = kMostListed / kChunk - 1;
constexpr int kWitnesses = 32;
constexpr int kFirstWitnesses = 8;
constexpr float kLowest = -1e38f;      // below all products
constexpr float kMostInHalf = 60000;   // of a dim
constexpr uint16_t kNone = 0xffff;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int64_t kMostSubVectors = 1 << 23;  // that are sorted at once
constexpr int kSubVectorsOfLeaf = 32;         // from which on it is worth it

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

__device__ uint32_t order_of_float(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float float_of_order(uint32_t order) {
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

__device__ void unpack(uint2 halves, float (&c)[kDims]) {
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

// ---- Cells ----

// A split is halfway between the children's boxes, and has its dim in its lowest bits.
__device__ float split_of(const uint4* boxes, int node) {
  const uint4 own = boxes[node], first = boxes[2 * node + 1], second = boxes[2 * node + 2];
  float low[kDims], high[kDims], end[kDims], begin[kDims];
  unpack(make_uint2(own.x, own.y), low);
  unpack(make_uint2(own.z, own.w), high);
  unpack(make_uint2(first.z, first.w), end);
  unpack(make_uint2(second.x, second.y), begin);
  uint32_t dim = 0;
  float widest = -1, split = 0;
#pragma unroll
  for (int d = 0; d < kDims; ++d) {
    if (high[d] - low[d] <= widest) continue;
    widest = high[d] - low[d];
    split = (end[d] + begin[d]) / 2;
    dim = static_cast<uint32_t>(d);
  }
  return __uint_as_float((__float_as_uint(split) & ~3u) | dim);
}

// Raises eight bounds to those of x. Most sub-vectors lie within what is known.
__device__ void include(uint32_t* bounds, const uint32_t (&own)[2 * kDims]) {
  const uint4 most = reinterpret_cast<const uint4*>(bounds)[0], least = reinterpret_cast<const uint4*>(bounds)[1];
  const uint32_t known[2 * kDims] = {most.x, most.y, most.z, most.w, least.x, least.y, least.z, least.w};
#pragma unroll
  for (int i = 0; i < 2 * kDims; ++i) {
    if (own[i] > known[i]) atomicMax(bounds + i, own[i]);
  }
}

// A thread block has a run of the copies, and sorts those of one kv head at once.
template <class T>
__global__ void __launch_bounds__(kCellThreads, 1) find_cells(const __grid_constant__ Cells s) {
  __shared__ float splits[kMostTreeLeaves];
  __shared__ uint32_t counts[kMostTreeLeaves];
  __shared__ __align__(16) uint32_t bounds[kMostTreeLeaves * 2 * kDims];
  const EncodeKeysArguments& a = s.a;
  const int thread = static_cast<int>(threadIdx.x);
  const int end = min((static_cast<int>(blockIdx.x) + 1) * s.run, a.copies);
  int last = 0;
  for (int copy = static_cast<int>(blockIdx.x) * s.run; copy < end; copy = last) {
    const int head = a.heads[copy];
    for (last = copy + 1; last < end && a.heads[last] == head;) ++last;
    const Tree tree(s, head);
    __syncthreads();
    for (int leaf = thread; leaf < s.leaves(); leaf += kCellThreads) {
      if (leaf + 1 < s.leaves()) splits[leaf] = split_of(tree.boxes, leaf);
      counts[leaf] = 0;
      reinterpret_cast<uint4*>(bounds)[2 * leaf] = reinterpret_cast<uint4*>(bounds)[2 * leaf + 1] = make_uint4(0, 0, 0, 0);
    }
    if (copy + thread < last) clear_spoilt(a, copy + thread);
    __syncthreads();
    const auto begin = static_cast<uint32_t>(copy) * static_cast<uint32_t>(s.of_copy());
    const int count = (last - copy) * s.of_copy();
    uint32_t places[kOfThread];  // leaf, and place among those of the run
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int own = i * kCellThreads + thread;
      places[i] = UINT32_MAX;
      if (own >= count) continue;
      float x[kDims];
      load_sub_vector<T>(s, head, begin + static_cast<uint32_t>(own), x);
      bool finite = true;
#pragma unroll
      for (int d = 0; d < kDims; ++d) finite = finite && fabsf(x[d]) < INFINITY;
      if (!finite) continue;
      int node = 0;
      for (int level = 0; level < s.levels; ++level) {
        const float split = splits[node];
        const uint32_t dim = __float_as_uint(split) & 3;
        const float along = dim < 2 ? (dim == 0 ? x[0] : x[1]) : (dim == 2 ? x[2] : x[3]);
        node = 2 * node + (along < split ? 1 : 2);
      }
      const int leaf = node + 1 - s.leaves();
      uint32_t orders[2 * kDims];
#pragma unroll
      for (int d = 0; d < kDims; ++d) {
        orders[d] = order_of_float(x[d]);
        orders[kDims + d] = order_of_float(-x[d]);
      }
      include(bounds + leaf * 2 * kDims, orders);
      places[i] = static_cast<uint32_t>(leaf) << 16 | atomicAdd(counts + leaf, 1u);
    }
    __syncthreads();
    for (int leaf = thread; leaf < s.leaves(); leaf += kCellThreads) {
      if (counts[leaf] == 0) continue;
      const int64_t cell = int64_t{head} * s.leaves() + leaf;
      counts[leaf] = atomicAdd(s.counts + cell, counts[leaf]);
      uint32_t orders[2 * kDims];
#pragma unroll
      for (int i = 0; i < 2 * kDims; ++i) orders[i] = bounds[leaf * 2 * kDims + i];
      include(s.bounds + cell * 2 * kDims, orders);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int own = i * kCellThreads + thread;
      if (own >= count) continue;
      const uint32_t leaf = places[i] >> 16;
      s.codes[begin + own] = static_cast<uint16_t>(leaf);
      if (leaf != kNone) s.ranks[begin + own] = counts[leaf] + (places[i] & 0xffff);
    }
  }
}

// Leaves begin in any order. A thread has one.
__global__ void __launch_bounds__(kStartThreads) start_cells(const __grid_constant__ Cells s) {
  using Scan = cub::BlockScan<uint32_t, kStartThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ uint32_t begin;
  const int cell = static_cast<int>(blockIdx.x) * kStartThreads + static_cast<int>(threadIdx.x);
  const bool there = cell < s.a.kv_heads * s.leaves();
  uint32_t before, all;
  Scan(storage).ExclusiveSum(there ? s.counts[cell] : 0, before, all);
  if (threadIdx.x == 0) begin = atomicAdd(s.ended, all);
  __syncthreads();
  if (there) s.starts[cell] = begin + before;
}

// What a thread block that writes the order of a run keeps in shared memory.
struct RunOrder {
  uint32_t numbers[kOfThread * kCellThreads];  // leaf after leaf
  uint32_t counts[kMostTreeLeaves];
  uint32_t first_ranks[kMostTreeLeaves];
  uint32_t begins[kMostTreeLeaves];  // place in the order, less place in `numbers`
  cub::BlockScan<uint32_t, kCellThreads>::TempStorage scan;
};

// Writes the order of the runs of find_cells. The sub-vectors of a leaf and run follow each other in it, and are written so.
__global__ void __launch_bounds__(kCellThreads, 1) fill_cells(const __grid_constant__ Cells s) {
  static_assert(kMostTreeLeaves == kCellThreads, "a thread has a leaf");
  extern __shared__ uint4 memory[];
  auto& run = *reinterpret_cast<RunOrder*>(memory);
  const EncodeKeysArguments& a = s.a;
  const int thread = static_cast<int>(threadIdx.x);
  const int end = min((static_cast<int>(blockIdx.x) + 1) * s.run, a.copies);
  int last = 0;
  for (int copy = static_cast<int>(blockIdx.x) * s.run; copy < end; copy = last) {
    const int head = a.heads[copy];
    for (last = copy + 1; last < end && a.heads[last] == head;) ++last;
    const auto begin = static_cast<uint32_t>(copy) * static_cast<uint32_t>(s.of_copy());
    const int count = (last - copy) * s.of_copy();
    __syncthreads();
    run.counts[thread] = 0;
    run.first_ranks[thread] = UINT32_MAX;
    __syncthreads();
    uint16_t leaves[kOfThread];
    uint32_t ranks[kOfThread];
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int own = i * kCellThreads + thread;
      leaves[i] = own < count ? s.codes[begin + own] : kNone;
      ranks[i] = leaves[i] == kNone ? 0 : s.ranks[begin + own];
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (leaves[i] == kNone) continue;
      atomicAdd(run.counts + leaves[i], 1u);
      atomicMin(run.first_ranks + leaves[i], ranks[i]);
    }
    __syncthreads();
    uint32_t before, all;
    cub::BlockScan<uint32_t, kCellThreads>(run.scan).ExclusiveSum(run.counts[thread], before, all);
    if (run.counts[thread] > 0) run.begins[thread] = s.starts[int64_t{head} * s.leaves() + thread] + run.first_ranks[thread] - before;
    run.first_ranks[thread] -= before;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (leaves[i] != kNone) run.numbers[ranks[i] - run.first_ranks[leaves[i]]] = begin + i * kCellThreads + thread;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < all; i += kCellThreads) {
      const uint32_t number = run.numbers[i];
      s.order[run.begins[s.codes[number]] + i] = number;
    }
  }
}

// ---- Search ----

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
__device__ void add(List& list, bool kept, uint2 halves, float product, int number) {
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
__device__ void make_list(List& list, const Tree& tree, const Box& box, int leaf) {
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
__device__ int search(const List& list, const Tree& tree, const float (&x)[kDims]) {
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

// A thread block for each leaf of a kv head.
template <class T>
__global__ void __launch_bounds__(kSearchThreads, 4) search_cells(const __grid_constant__ Cells s) {
  __shared__ List list;
  const int leaf = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int64_t cell = int64_t{head} * s.leaves() + leaf;
  const uint32_t first = s.starts[cell];
  const uint32_t end = first + s.counts[cell];
  if (first == end) return;
  const Tree tree(s, head);
  make_list(list, tree, Box(s.bounds + cell * 2 * kDims), leaf);
  const bool listed = tree.sound && list.count <= kMostListed;
  const auto* book = reinterpret_cast<const uint2*>(s.a.centroids + s.a.book_offset(head, 0));
  for (uint32_t own = first + threadIdx.x / kWarp * kWarp; own < end; own += kSearchThreads) {
    const uint32_t place = own + threadIdx.x % kWarp;
    const uint32_t number = s.order[min(place, end - 1)];
    float x[kDims];
    load_sub_vector<T>(s, head, number, x);
    int code = kNone;
    if (listed) {
      code = search(list, tree, x);
    } else {
      for (int lane = 0; lane < kWarp; ++lane) {
        const int found = compare_all(x, lane, tree.count, [&](int c) { return __ldg(book + c); }, [&](int c) { return c; });
        if (static_cast<int>(threadIdx.x) % kWarp == lane) code = found;
      }
    }
    if (place < end) s.codes[number] = static_cast<uint16_t>(code);
  }
}

// ---- Words ----

// A warp has a chunk of a block, and a lane a stream.
__global__ void __launch_bounds__(kCopyThreads) write_words(const __grid_constant__ Cells s) {
  const int copy = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int groups = s.a.groups();
  const uint16_t* codes = s.codes + int64_t{copy} * s.of_copy();
  for (int chunk = static_cast<int>(threadIdx.x) / kWarp; chunk < coded_chunks(groups); chunk += kCopyThreads / kWarp) {
    const int quads = quads_of_chunk(groups, chunk);
    if (lane >= kChunkOctets * quads) continue;
    StreamWriter writer(s.a, copy, chunk, lane, kChunkOctets * quads);
    for (int place = 0; place < kStreamCodes; ++place) {
      const int token = token_of(lane / quads, place);
      const int group = chunk * kChunkGroups + lane % quads * kQuadGroups + group_of(place);
      const uint16_t code = group < groups ? codes[token * groups + group] : 0;
      writer.write(code == kNone ? -1 : code, token);
    }
  }
}

// ---- Launch ----

template <class T>
Status encode_piece(Cells s, ExecutionContext& context) {
  const EncodeKeysArguments& a = s.a;
  cudaStream_t stream = stream_of(context);
  const auto leaves = static_cast<size_t>(a.kv_heads) << s.levels;
  const auto sub_vectors = static_cast<size_t>(a.copies) * kCodedBlockTokens * static_cast<size_t>(a.groups());
  const size_t cleared = leaves * (1 + 2 * kDims) + 1;
  const size_t words = cleared + leaves + 2 * sub_vectors;
  s.bounds = static_cast<uint32_t*>(context.queue->workspace(words * sizeof(uint32_t) + sub_vectors * sizeof(uint16_t)));
  if (s.bounds == nullptr) return Status::failure(StatusCode::out_of_memory, "no room to sort keys in");
  s.counts = s.bounds + leaves * 2 * kDims;
  s.ended = s.counts + leaves;
  s.starts = s.bounds + cleared;
  s.ranks = s.starts + leaves;
  s.order = s.ranks + sub_vectors;
  s.codes = reinterpret_cast<uint16_t*>(s.order + sub_vectors);
  s.aligned = reinterpret_cast<uintptr_t>(a.keys) % 8 == 0 && a.block_stride % kDims == 0 && a.token_stride % kDims == 0;
  s.run = std::max(1, kOfThread * kCellThreads / (kCodedBlockTokens * a.groups()));
  cudaError_t error = cudaFuncSetAttribute(fill_cells, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(RunOrder));
  if (error == cudaSuccess) error = cudaMemsetAsync(s.bounds, 0, cleared * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return cuda_status(error);
  const auto copies = static_cast<unsigned>(a.copies);
  const auto runs = static_cast<unsigned>((a.copies + s.run - 1) / s.run);
  find_cells<T><<<runs, kCellThreads, 0, stream>>>(s);
  start_cells<<<static_cast<unsigned>((leaves + kStartThreads - 1) / kStartThreads), kStartThreads, 0, stream>>>(s);
  fill_cells<<<runs, kCellThreads, sizeof(RunOrder), stream>>>(s);
  search_cells<T><<<dim3(1u << s.levels, static_cast<unsigned>(a.kv_heads)), kSearchThreads, 0, stream>>>(s);
  write_words<<<copies, kCopyThreads, 0, stream>>>(s);
  return launch_status();
}

}  // namespace

bool fits_encode_keys_cells(const EncodeKeysArguments& a) {
  if (a.sub_dim != kDims || a.books != 1 || reinterpret_cast<uintptr_t>(a.centroids) % 8 != 0) return false;
  const int levels = IndexShape(a.centroid_count, kDims).most_levels;
  const int64_t sub_vectors = int64_t{a.copies} * kCodedBlockTokens * a.groups();
  return levels >= kLeastLevels && sub_vectors >= (int64_t{kSubVectorsOfLeaf} * a.kv_heads << levels);
}

Status encode_keys_cells(const EncodeKeysArguments& a, ExecutionContext& context) {
  Cells s{};
  s.a = a;
  s.levels = IndexShape(a.centroid_count, kDims).most_levels;
  const int64_t of_copy = int64_t{kCodedBlockTokens} * a.groups();
  const int64_t pieces = (a.copies * of_copy + kMostSubVectors - 1) / kMostSubVectors;
  Status status;
  for (int64_t piece = 0; piece < pieces && status.ok(); ++piece) {
    const int64_t first = a.copies * piece / pieces;
    s.a.from = a.from + first;
    s.a.to = a.to + first;
    s.a.heads = a.heads + first;
    s.a.copies = static_cast<int32_t>(a.copies * (piece + 1) / pieces - first);
    with_cuda_float_type(a.dtype, [&](auto element) { status = encode_piece<decltype(element)>(s, context); });
  }
  return status;
}

}  // namespace kv::cuda
