// Where all groups share a book of sub-vectors of two or four dims, a thread block keeps it in shared memory, with the splits
// of its index, for as many blocks of one kv head as follow each other. A warp encodes a chunk of a block, and a lane the
// codes of one stream: first it finds the leaves of all, then it goes through their lists, each lane at its own pace. Any
// other sub-vector is compared with every centroid.
#include "kernels/encode-keys/encode-keys.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kAnyThreads = 512;
constexpr int kSlotBytes = 2 * kStreamCodes * kWarp;  // of a warp
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kNone = 0xffff;  // in place of a code: no centroid is near

__device__ float square(float x, float centroid) {
  const float away = __fsub_rn(x, centroid);
  return __fmul_rn(away, away);
}

__device__ float2 floats(uint32_t halves) { return __half22float2(*reinterpret_cast<const __half2*>(&halves)); }

// Of sub-vectors of two and four dims, rounded as on the CPU.
__device__ float distance(const float (&x)[2], uint32_t centroid) {
  const float2 c = floats(centroid);
  return __fadd_rn(square(x[0], c.x), square(x[1], c.y));
}
__device__ float distance(const float (&x)[4], uint2 centroid) {
  const float2 low = floats(centroid.x), high = floats(centroid.y);
  const float half = __fadd_rn(square(x[0], low.x), square(x[1], low.y));
  return __fadd_rn(__fadd_rn(half, square(x[2], high.x)), square(x[3], high.y));
}

__device__ void clear_spoilt(const EncodeKeysArguments& a, int copy) {
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

// ---- One book of all groups, with lists. ----

template <int kSubDim>
struct CentroidWord;
template <>
struct CentroidWord<2> {
  using Type = uint32_t;
};
template <>
struct CentroidWord<4> {
  using Type = uint2;
};

// A kv head's book and index. What an index says is checked where it could lead outside of memory, for it may hold anything.
template <int kSubDim>
struct Book {
  using Centroid = typename CentroidWord<kSubDim>::Type;

  const IndexHeader* header;  // in shared memory
  const float* splits;
  const uint16_t* starts;
  const uint4* chunks;
  int most_chunks;
  int count;
  int levels;  // below 0 if there are no lists

  // The book has all the room that an entry of a chunk can lead to.
  static constexpr int kBookBytes = kMostCentroids * sizeof(Centroid);
  static constexpr uint32_t kEntryBits = kBookBytes - sizeof(Centroid);

  static constexpr int shared_bytes(int centroids) { return kBookBytes + static_cast<int>(IndexShape(centroids, kSubDim).second()); }

  // All threads of the block. Shared memory begins with the centroids.
  __device__ Book(const EncodeKeysArguments& a, int head) : count(a.centroid_count) {
    extern __shared__ uint4 memory[];
    const IndexShape shape(count, kSubDim);
    const uint8_t* index = a.index + head * shape.bytes();
    starts = reinterpret_cast<const uint16_t*>(index + shape.second());
    chunks = reinterpret_cast<const uint4*>(index + shape.third());
    most_chunks = shape.most_chunks;
    uint4* of_index = memory + kBookBytes / 16;
    fetch(memory, a.centroids + a.book_offset(head, 0), int64_t{count} * kSubDim * 2);
    fetch(of_index, index, shape.second());
    header = reinterpret_cast<const IndexHeader*>(of_index);
    splits = reinterpret_cast<const float*>(of_index + kIndexHeaderBytes / 16);
    __syncthreads();
    levels = header->levels > shape.most_levels ? -1 : header->levels;
  }

  // The centroid that begins there, in bytes.
  static __device__ Centroid at(uint32_t entry) {
    extern __shared__ uint4 memory[];
    return *reinterpret_cast<const Centroid*>(reinterpret_cast<const uint8_t*>(memory) + entry);
  }

  __device__ bool inside(const float (&x)[kSubDim]) const {
    bool inside = levels >= 0;
#pragma unroll
    for (int d = 0; d < kSubDim; ++d) inside = inside && x[d] >= header->lowest[d] && x[d] <= header->highest[d];
    return inside;
  }

 private:
  static __device__ void fetch(uint4* to, const void* from, int64_t bytes) {
    for (int64_t i = threadIdx.x; i * 16 < bytes; i += blockDim.x) to[i] = static_cast<const uint4*>(from)[i];
  }
};

// The sub-vectors of a stream, by their places.
template <class T, int kSubDim>
class Stream {
 public:
  struct alignas(kSubDim * sizeof(T)) Raw {
    uint32_t words[kSubDim * sizeof(T) / 4];
  };

  __device__ Stream(const EncodeKeysArguments& a, int copy, int chunk, int octet, int quad)
      : token_stride_(static_cast<uint32_t>(a.token_stride)), keys_(static_cast<const T*>(a.keys) + a.from[copy] * a.block_stride), scales_(a.channel_scale) {
    const int group = chunk * kChunkGroups + quad * kQuadGroups;
    keys_ += token_of(octet, 0) * a.token_stride + group * kSubDim;
    if (scales_ != nullptr) scales_ += int64_t{a.heads[copy]} * a.head_dim + group * kSubDim;
    last_group_ = static_cast<uint32_t>(min(kQuadGroups, a.groups() - group) - 1);
  }

  __device__ Raw load(uint32_t place) const {
    return *reinterpret_cast<const Raw*>(keys_ + (place / 16 * 32 + place / 4 % 4) * token_stride_ + group(place) * kSubDim);
  }

  __device__ void unpack(const Raw& raw, uint32_t place, float (&x)[kSubDim]) const {
#pragma unroll
    for (int d = 0; d < kSubDim; ++d) x[d] = to_float(reinterpret_cast<const T*>(raw.words)[d]);
    if (scales_ == nullptr) return;
#pragma unroll
    for (int d = 0; d < kSubDim; ++d) x[d] = __fdiv_rn(x[d], scales_[group(place) * kSubDim + d]);
  }

 private:
  // Of those that fill up the last quad, the last one there is.
  __device__ uint32_t group(uint32_t place) const { return min(place % kQuadGroups, last_group_); }

  uint32_t token_stride_;
  uint32_t last_group_;
  const T* keys_;
  const float* scales_;
};

// `slots` are the lane's, one for each place and kWarp from each other. Writes the first chunk of each sub-vector's list. The
// result has a bit for each place that has none. The four groups of a token are four chains of loads.
template <class T, int kSubDim>
__device__ uint32_t find_lists(const Book<kSubDim>& book, const Stream<T, kSubDim>& stream, uint16_t* slots) {
  uint32_t open = 0;
#pragma unroll 1
  for (uint32_t place = 0; place < kStreamCodes; place += kQuadGroups) {
    float x[kQuadGroups][kSubDim];
    int node[kQuadGroups];
#pragma unroll
    for (int g = 0; g < kQuadGroups; ++g) {
      stream.unpack(stream.load(place + g), place + g, x[g]);
      node[g] = 0;
    }
#pragma unroll 1
    for (int level = 0; level < book.levels; ++level) {
#pragma unroll
      for (int g = 0; g < kQuadGroups; ++g) {
        const float split = book.splits[node[g]];
        const uint32_t dim = __float_as_uint(split);
        float along = (dim & 1) != 0 ? x[g][1] : x[g][0];
        if constexpr (kSubDim == 4) {
          if ((dim & 2) != 0) along = (dim & 1) != 0 ? x[g][3] : x[g][2];
        }
        node[g] = 2 * node[g] + (along < split ? 1 : 2);
      }
    }
#pragma unroll
    for (int g = 0; g < kQuadGroups; ++g) {
      const int leaf = node[g] + 1 - (1 << max(book.levels, 0));
      slots[(place + g) * kWarp] = __ldg(book.starts + leaf);
      if (!book.inside(x[g])) open |= 1u << (place + g);
    }
  }
  return open;
}

// Puts codes in place of the lists' first chunks. The result has a bit for each place whose list does not say which.
template <class T, int kSubDim>
__device__ uint32_t search_lists(const Book<kSubDim>& book, const Stream<T, kSubDim>& stream, uint16_t* slots) {
  uint32_t open = 0;
  float x[kSubDim];
  float nearest;
  uint32_t entry;
  int chunk;
  auto next = stream.load(0);
  const auto begin = [&](uint32_t place) {
    stream.unpack(next, place, x);
    next = stream.load(min(place + 1, kStreamCodes - 1u));
    chunk = min(static_cast<int>(*slots), book.most_chunks - 1);
    nearest = INFINITY;
    entry = UINT32_MAX;
  };
  begin(0);
  for (uint32_t place = 0; place < kStreamCodes;) {
    const uint4 own = __ldg(book.chunks + chunk);
    const uint32_t words[kChunkWords] = {own.x, own.y, own.z, own.w};
    float least = INFINITY;
    uint32_t of_least = UINT32_MAX;
#pragma unroll
    for (int i = 0; i < kChunkCentroids; ++i) {
      const uint32_t other = words[i / 2] >> 16 * (i % 2) & Book<kSubDim>::kEntryBits;
      const float far = distance(x, book.at(other));
      if (far < least) least = far, of_least = other;
    }
    if (least < nearest || (least == nearest && of_least < entry)) nearest = least, entry = of_least;
    const bool done = nearest < __uint_as_float(own.w & 0x7fff0000u);
    ++chunk;
    if (!done && own.w >> 31 == 0 && chunk < book.most_chunks) continue;
    *slots = static_cast<uint16_t>(entry / sizeof(typename Book<kSubDim>::Centroid));
    if (!done) open |= 1u << place;
    slots += kWarp;
    if (++place < kStreamCodes) begin(place);
  }
  return open;
}

// The warp compares those that are open with every centroid.
template <class T, int kSubDim>
__device__ void compare_open(const Book<kSubDim>& book, const Stream<T, kSubDim>& stream, uint32_t open, uint16_t* slots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (uint32_t places = __reduce_or_sync(kAll, open); places != 0; places &= places - 1) {
    const int place = __ffs(static_cast<int>(places)) - 1;
    float own[kSubDim];
    stream.unpack(stream.load(place), place, own);
    for (uint32_t owners = __ballot_sync(kAll, (open >> place & 1) != 0); owners != 0; owners &= owners - 1) {
      const int owner = __ffs(static_cast<int>(owners)) - 1;
      float x[kSubDim];
#pragma unroll
      for (int d = 0; d < kSubDim; ++d) x[d] = __shfl_sync(kAll, own[d], owner);
      float nearest = INFINITY;
      uint32_t code = kNone;
      for (int c = lane; c < book.count; c += kWarp) {
        const float far = distance(x, book.at(c * sizeof(typename Book<kSubDim>::Centroid)));
        if (far < nearest) nearest = far, code = static_cast<uint32_t>(c);
      }
      const uint32_t least = __reduce_min_sync(kAll, __float_as_uint(nearest));
      const uint32_t found = __reduce_min_sync(kAll, __float_as_uint(nearest) == least ? code : kNone);
      if (lane == owner) slots[place * kWarp] = static_cast<uint16_t>(found);
    }
  }
}

template <class T, int kSubDim>
__device__ void encode_chunk(const EncodeKeysArguments& a, const Book<kSubDim>& book, int copy, int chunk, uint16_t* slots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int quads = quads_of_chunk(a.groups(), chunk);
  const int streams = kChunkOctets * quads;
  const int number = min(lane, streams - 1);
  const Stream<T, kSubDim> stream(a, copy, chunk, number / quads, number % quads);
  uint32_t open = find_lists(book, stream, slots + lane);
  open |= search_lists(book, stream, slots + lane);
  compare_open(book, stream, open, slots + lane);
  if (number < lane) return;
  StreamWriter writer(a, copy, chunk, lane, streams);
  for (int place = 0; place < kStreamCodes; ++place) {
    const uint32_t code = slots[lane + place * kWarp];
    const bool there = chunk * kChunkGroups + lane % quads * kQuadGroups + group_of(place) < a.groups();
    const int of_book = min(static_cast<int>(code), book.count - 1);
    writer.write(!there ? 0 : code == kNone ? -1 : of_book, token_of(lane / quads, place));
  }
}

// Each thread block encodes a run of the copies.
template <class T, int kSubDim>
__global__ void __launch_bounds__(kMostThreads, 1) encode_by_lists(const __grid_constant__ EncodeKeysArguments a) {
  extern __shared__ uint4 memory[];
  const int chunks = coded_chunks(a.groups());
  const int warp = static_cast<int>(threadIdx.x) / kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
  auto* slots = reinterpret_cast<uint16_t*>(reinterpret_cast<uint8_t*>(memory) + Book<kSubDim>::shared_bytes(a.centroid_count) + warp * kSlotBytes);
  int copy = static_cast<int>(int64_t{a.copies} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{a.copies} * (blockIdx.x + 1) / gridDim.x);
  for (int i = copy + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) clear_spoilt(a, i);
  while (copy < end) {
    const int head = a.heads[copy];
    int last = copy + 1;
    while (last < end && a.heads[last] == head) ++last;
    __syncthreads();
    const Book<kSubDim> book(a, head);
    for (int unit = warp; unit < (last - copy) * chunks; unit += warps) {
      encode_chunk<T, kSubDim>(a, book, copy + unit / chunks, unit % chunks, slots);
    }
    copy = last;
  }
}

// ---- Any books, read where they lie. ----

// Compares with every centroid.
__device__ int nearest_of_all(const float* x, const uint16_t* centroids, int count, int dims) {
  float nearest = INFINITY;
  int code = -1;
  for (int c = 0; c < count; ++c) {
    float sum = 0;
    for (int d = 0; d < dims; ++d) sum = __fadd_rn(sum, square(x[d], half_value(centroids[c * dims + d])));
    if (sum < nearest) nearest = sum, code = c;
  }
  return code;
}

template <class T>
__global__ void __launch_bounds__(kAnyThreads) encode_any(const __grid_constant__ EncodeKeysArguments a) {
  const int copy = static_cast<int>(blockIdx.x);
  const int head = a.heads[copy];
  const T* dense = static_cast<const T*>(a.keys) + a.from[copy] * a.block_stride;
  const float* scales = a.channel_scale == nullptr ? nullptr : a.channel_scale + int64_t{head} * a.head_dim;
  if (threadIdx.x == 0) clear_spoilt(a, copy);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int chunk = static_cast<int>(threadIdx.x) / kWarp; chunk < coded_chunks(a.groups()); chunk += kAnyThreads / kWarp) {
    const int quads = quads_of_chunk(a.groups(), chunk);
    if (lane >= kChunkOctets * quads) continue;
    StreamWriter writer(a, copy, chunk, lane, kChunkOctets * quads);
    for (int place = 0; place < kStreamCodes; ++place) {
      const int token = token_of(lane / quads, place);
      const int group = chunk * kChunkGroups + lane % quads * kQuadGroups + group_of(place);
      int code = 0;
      if (group < a.groups()) {
        const T* from = dense + token * a.token_stride + group * a.sub_dim;
        float x[kMostCodedDims];
        for (int d = 0; d < a.sub_dim; ++d) {
          x[d] = to_float(from[d]);
          if (scales != nullptr) x[d] = __fdiv_rn(x[d], scales[group * a.sub_dim + d]);
        }
        code = nearest_of_all(x, a.centroids + a.book_offset(head, group), a.centroid_count, a.sub_dim);
      }
      writer.write(code, token);
    }
  }
}

// ---- Launch ----

template <class T, int kSubDim>
Status launch_by_lists(const EncodeKeysArguments& a, int threads, int multiprocessors, ExecutionContext& context) {
  const auto kernel = encode_by_lists<T, kSubDim>;
  const int bytes = Book<kSubDim>::shared_bytes(a.centroid_count) + threads / kWarp * kSlotBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cuda_status(error);
  const auto blocks = static_cast<unsigned>(a.copies < multiprocessors ? a.copies : multiprocessors);
  kernel<<<blocks, static_cast<unsigned>(threads), static_cast<size_t>(bytes), stream_of(context)>>>(a);
  return launch_status();
}

// How many threads of a block have room, or 0.
template <class T, int kSubDim>
int threads_by_lists(const EncodeKeysArguments& a, int most_bytes) {
  // Books are read 16 bytes at a time, and a sub-vector at once.
  const bool whole = a.book_elements() % 8 == 0 && reinterpret_cast<uintptr_t>(a.centroids) % 16 == 0;
  const bool aligned = reinterpret_cast<uintptr_t>(a.keys) % sizeof(typename Stream<T, kSubDim>::Raw) == 0 &&
                       a.block_stride % kSubDim == 0 && a.token_stride % kSubDim == 0;
  const bool near = a.token_stride < INT32_MAX / kCodedBlockTokens;
  if (a.sub_dim != kSubDim || a.books != 1 || !whole || !aligned || !near) return 0;
  for (int threads = kMostThreads; threads >= kMostThreads / 2; threads /= 2) {
    if (Book<kSubDim>::shared_bytes(a.centroid_count) + threads / kWarp * kSlotBytes <= most_bytes) return threads;
  }
  return 0;
}

template <class T>
Status launch(const EncodeKeysArguments& a, ExecutionContext& context) {
  int device = 0, multiprocessors = 0, most_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return cuda_status(error);
  if (const int threads = threads_by_lists<T, 2>(a, most_bytes)) return launch_by_lists<T, 2>(a, threads, multiprocessors, context);
  if (const int threads = threads_by_lists<T, 4>(a, most_bytes)) return launch_by_lists<T, 4>(a, threads, multiprocessors, context);
  encode_any<T><<<static_cast<unsigned>(a.copies), kAnyThreads, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace

Status encode_keys_cuda(const EncodeKeysArguments& a, ExecutionContext& context) {
  Status status = Status::success();
  with_cuda_float_type(a.dtype, [&](auto element) { status = launch<decltype(element)>(a, context); });
  return status;
}

}  // namespace kv
