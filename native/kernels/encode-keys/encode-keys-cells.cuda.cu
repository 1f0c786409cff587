// Encodes many sub-vectors of four dims. They are sorted by the leaf of the index that they lie in. Few centroids can be the
// nearest of any sub-vector of such a cell. A thread block lists them, and its warps compare each with 32 sub-vectors at a
// time, on tensor cores: x c - |c|^2 / 2 is largest for the nearest one.
//
// Of eight centroids at a time only the largest product is kept, with the place of the eight in its lowest bits. The
// distances from the best eight are then computed as on the CPU. Where the second best are closer to them than rounding,
// those from all that are listed are.
#include <cub/block/block_scan.cuh>

#include <algorithm>

#include "kernels/encode-keys/encode-keys-list.cuda.h"

namespace kv::cuda {
namespace cells {
namespace {

constexpr int kLeastLevels = 5;
constexpr int kCellThreads = 1024;
constexpr int kOfThread = 16;  // sub-vectors
constexpr int kStartThreads = 256;
constexpr int kCopyThreads = 256;
constexpr int64_t kMostSubVectors = 1 << 23;  // that are sorted at once
constexpr int kSubVectorsOfLeaf = 32;         // from which on it is worth it

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
  s.bounds = static_cast<uint32_t*>(context.workspace(words * sizeof(uint32_t) + sub_vectors * sizeof(uint16_t)));
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
}  // namespace cells

bool fits_encode_keys_cells(const EncodeKeysArguments& a) {
  if (a.sub_dim != cells::kDims || a.books != 1 || reinterpret_cast<uintptr_t>(a.centroids) % 8 != 0) return false;
  const int levels = IndexShape(a.centroid_count, cells::kDims).most_levels;
  const int64_t sub_vectors = int64_t{a.copies} * kCodedBlockTokens * a.groups();
  return levels >= cells::kLeastLevels && sub_vectors >= (int64_t{cells::kSubVectorsOfLeaf} * a.kv_heads << levels);
}

Status encode_keys_cells(const EncodeKeysArguments& a, ExecutionContext& context) {
  cells::Cells s{};
  s.a = a;
  s.levels = IndexShape(a.centroid_count, cells::kDims).most_levels;
  const int64_t of_copy = int64_t{kCodedBlockTokens} * a.groups();
  const int64_t pieces = (a.copies * of_copy + cells::kMostSubVectors - 1) / cells::kMostSubVectors;
  Status status;
  for (int64_t piece = 0; piece < pieces && status.ok(); ++piece) {
    const int64_t first = a.copies * piece / pieces;
    s.a.from = a.from + first;
    s.a.to = a.to + first;
    s.a.heads = a.heads + first;
    s.a.copies = static_cast<int32_t>(a.copies * (piece + 1) / pieces - first);
    with_cuda_float_type(a.dtype, [&](auto element) { status = cells::encode_piece<decltype(element)>(s, context); });
  }
  return status;
}

}  // namespace kv::cuda
