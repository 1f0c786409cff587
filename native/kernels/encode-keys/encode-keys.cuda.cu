// A thread encodes the codes of one stream, and a warp those of a chunk. Where all groups share a book, the thread block
// keeps its centroids and the splits of its tree in shared memory, for as many blocks of one kv head as follow each other.
#include "kernels/encode-keys/encode-keys.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostSharedBytes = 96 << 10;  // what every device has for a thread block; Hopper has room for two

// One book, in global or in shared memory.
struct Book {
  const uint16_t* centroids;
  const uint8_t* splits;
  const uint4* chunks;
  int most_chunks;
  int count;
  IndexHeader header;
};

// Of `kSubDim` dims, or of any number if that is 0.
template <int kSubDim>
class Search {
 public:
  __device__ Search(const Book& book, int sub_dim) : book_(book), dims_(kSubDim == 0 ? sub_dim : kSubDim) {}

  // `x` is [dims].
  __device__ int nearest(const float* x) {
    best_ = INFINITY;
    code_ = 0;
    if (indexed(x)) {
      search_leaf(x);
    } else {
      for (int c = 0; c < book_.count; ++c) compare(x, c);
    }
    return code_;
  }

 private:
  // What an index says is checked where it could lead outside of memory, for it may hold anything.
  __device__ bool indexed(const float* x) const {
    if constexpr (kSubDim == 0 || kSubDim > kMostIndexedDims) {
      return false;
    } else {
      bool inside = book_.header.levels >= 0;
#pragma unroll
      for (int d = 0; d < kSubDim; ++d) inside = inside && x[d] >= book_.header.lowest[d] && x[d] <= book_.header.highest[d];
      return inside;
    }
  }

  __device__ void search_leaf(const float* x) {
    int node = 0;
    for (int level = 0; level < book_.header.levels; ++level) {
      const float split = *reinterpret_cast<const float*>(book_.splits + 4 * node);
      const float along = kSubDim > 1 && __float_as_uint(split) % 2 == 1 ? x[kSubDim - 1] : x[0];
      node = 2 * node + (along < split ? 1 : 2);
    }
    int chunk = node + 1 - (1 << book_.header.levels);
    while (true) {
      const uint4 entries = book_.chunks[chunk];
      const uint32_t words[4] = {entries.x, entries.y, entries.z, entries.w};
#pragma unroll
      for (int i = 0; i < kChunkCentroids; ++i) {
        const int centroid = static_cast<int>(words[i / 2] >> 16 * (i % 2) & 0xffffu);
        compare(x, min(centroid, book_.count - 1));
      }
      const int next = static_cast<int>(words[3] >> 16);
      if (next <= chunk || next >= book_.most_chunks) return;
      chunk = next;
    }
  }

  __device__ void compare(const float* x, int centroid) {
    float distance;
    if constexpr (kSubDim == 2) {
      const float2 c = __half22float2(reinterpret_cast<const __half2*>(book_.centroids)[centroid]);
      distance = __fadd_rn(square(x[0], c.x), square(x[1], c.y));
    } else if constexpr (kSubDim == 4) {
      const uint2 halves = reinterpret_cast<const uint2*>(book_.centroids)[centroid];
      const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&halves.x));
      const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&halves.y));
      distance = __fadd_rn(square(x[0], low.x), square(x[1], low.y));
      distance = __fadd_rn(__fadd_rn(distance, square(x[2], high.x)), square(x[3], high.y));
    } else {
      distance = 0;
      for (int d = 0; d < dims_; ++d) {
        distance = __fadd_rn(distance, square(x[d], half_value(book_.centroids[centroid * dims_ + d])));
      }
    }
    if (distance < best_) best_ = distance, code_ = centroid;
  }

  static __device__ float square(float x, float centroid) {
    const float away = __fsub_rn(x, centroid);
    return __fmul_rn(away, away);
  }

  const Book& book_;
  const int dims_;
  float best_ = INFINITY;
  int code_ = 0;
};

__device__ Book book_of(const EncodeKeysArguments& a, int head, int group) {
  const IndexShape shape(a.centroid_count, a.sub_dim);
  const uint8_t* index = a.index + a.book_offset(head, group) / a.book_elements() * shape.bytes();
  Book book{a.centroids + a.book_offset(head, group), index + kIndexHeaderBytes,
            reinterpret_cast<const uint4*>(index + shape.chunk_offset()), shape.most_chunks, a.centroid_count, {}};
  book.header = *reinterpret_cast<const IndexHeader*>(index);
  if (book.header.levels > shape.most_levels) book.header.levels = -1;
  return book;
}

// Writes the codes of a stream: eight tokens of a quad, from `quad_group` on.
template <class T, int kSubDim, class BookOfGroup>
__device__ void encode_stream(const EncodeKeysArguments& a, const T* dense, int head, int octet, int quad_group,
                              uint32_t* words, int step, BookOfGroup&& book_of_group) {
  constexpr int kRoom = kSubDim == 0 ? kMostCodedDims : kSubDim;
  const int sub_dim = kSubDim == 0 ? a.sub_dim : kSubDim;
  const float* scales = a.channel_scale == nullptr ? nullptr : a.channel_scale + int64_t{head} * a.head_dim;
  uint64_t pending = 0;
  int filled = 0;
  for (int place = 0; place < kStreamCodes; ++place) {
    const int group = quad_group + group_of(place);
    int code = 0;
    if (group < a.groups()) {
      const T* from = dense + token_of(octet, place) * a.token_stride + group * sub_dim;
      float x[kRoom];
#pragma unroll 4
      for (int d = 0; d < sub_dim; ++d) {
        x[d] = to_float(from[d]);
        if (scales != nullptr) x[d] = __fdiv_rn(x[d], scales[group * sub_dim + d]);
      }
      code = Search<kSubDim>(book_of_group(group), sub_dim).nearest(x);
    }
    pending |= static_cast<uint64_t>(code) << filled;
    filled += a.code_bits;
    if (filled >= 32) {
      *words = static_cast<uint32_t>(pending);
      words += step;
      pending >>= 32;
      filled -= 32;
    }
  }
}

template <class T, int kSubDim, class BookOfGroup>
__device__ void encode_chunk(const EncodeKeysArguments& a, int copy, int chunk, BookOfGroup&& book_of_group) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int quads = quads_of_chunk(a.groups(), chunk);
  const int step = kChunkOctets * quads;
  if (lane >= step) return;
  uint8_t* block = a.codes + a.to[copy] * a.block_bytes();
  encode_stream<T, kSubDim>(a, static_cast<const T*>(a.keys) + a.from[copy] * a.block_stride, a.heads[copy], lane / quads,
                            chunk * kChunkGroups + lane % quads * kQuadGroups,
                            reinterpret_cast<uint32_t*>(block) + chunk_offset(chunk, a.code_bits) + lane, step, book_of_group);
}

// ---- One book of all groups, in shared memory. ----

__device__ void fetch(uint4* to, const void* from, int64_t bytes) {
  for (int64_t i = threadIdx.x; i * 16 < bytes; i += kThreads) to[i] = static_cast<const uint4*>(from)[i];
}

template <int kSubDim>
struct SharedBook {
  int64_t centroid_bytes;
  int64_t split_bytes;

  __host__ __device__ explicit SharedBook(int centroids)
      : centroid_bytes((int64_t{centroids} * kSubDim * 2 + 15) / 16 * 16),
        split_bytes(kSubDim > kMostIndexedDims ? 0 : IndexShape(centroids, kSubDim).chunk_offset() - kIndexHeaderBytes) {}
  __host__ __device__ int64_t bytes() const { return centroid_bytes + split_bytes; }
};

// Each thread block encodes a run of the copies.
template <class T, int kSubDim>
__global__ void __launch_bounds__(kThreads, 2) encode_with_shared_book(const __grid_constant__ EncodeKeysArguments a) {
  extern __shared__ uint4 memory[];
  const SharedBook<kSubDim> layout(a.centroid_count);
  const int chunks = coded_chunks(a.groups());
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int copy = static_cast<int>(int64_t{a.copies} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{a.copies} * (blockIdx.x + 1) / gridDim.x);
  while (copy < end) {
    const int head = a.heads[copy];
    int last = copy + 1;
    while (last < end && a.heads[last] == head) ++last;
    Book book = book_of(a, head, 0);
    __syncthreads();
    fetch(memory, book.centroids, layout.centroid_bytes);
    fetch(memory + layout.centroid_bytes / 16, book.splits, layout.split_bytes);
    __syncthreads();
    book.centroids = reinterpret_cast<const uint16_t*>(memory);
    book.splits = reinterpret_cast<const uint8_t*>(memory + layout.centroid_bytes / 16);
    for (int unit = warp; unit < (last - copy) * chunks; unit += kWarps) {
      encode_chunk<T, kSubDim>(a, copy + unit / chunks, unit % chunks, [&](int) -> const Book& { return book; });
    }
    copy = last;
  }
}

// Whether the books are read 16 bytes at a time.
bool fits_shared_memory(const EncodeKeysArguments& a, int64_t bytes) {
  const bool whole = a.book_elements() % 8 == 0 && reinterpret_cast<uintptr_t>(a.centroids) % 16 == 0;
  return a.books == 1 && whole && bytes <= kMostSharedBytes;
}

template <class T, int kSubDim>
Status launch_with_shared_book(const EncodeKeysArguments& a, int64_t bytes, ExecutionContext& context) {
  const auto kernel = encode_with_shared_book<T, kSubDim>;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
  if (error != cudaSuccess) return cuda_status(error);
  const int blocks = a.copies < 2 * multiprocessors ? a.copies : 2 * multiprocessors;
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(bytes), stream_of(context)>>>(a);
  return launch_status();
}

// ---- Any books, read where they lie. ----

template <class T>
__global__ void __launch_bounds__(kThreads) encode_any(const __grid_constant__ EncodeKeysArguments a) {
  const int chunks = coded_chunks(a.groups());
  const int head = a.heads[blockIdx.x];
  for (int chunk = static_cast<int>(threadIdx.x) / kWarp; chunk < chunks; chunk += kWarps) {
    encode_chunk<T, 0>(a, static_cast<int>(blockIdx.x), chunk, [&](int group) { return book_of(a, head, group); });
  }
}

template <class T>
Status launch(const EncodeKeysArguments& a, ExecutionContext& context) {
  const int64_t two = SharedBook<2>(a.centroid_count).bytes();
  const int64_t four = SharedBook<4>(a.centroid_count).bytes();
  if (a.sub_dim == 2 && fits_shared_memory(a, two)) return launch_with_shared_book<T, 2>(a, two, context);
  if (a.sub_dim == 4 && fits_shared_memory(a, four)) return launch_with_shared_book<T, 4>(a, four, context);
  encode_any<T><<<static_cast<unsigned>(a.copies), kThreads, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace

Status encode_keys_cuda(const EncodeKeysArguments& a, ExecutionContext& context) {
  Status status = Status::success();
  with_cuda_float_type(a.dtype, [&](auto element) { status = launch<decltype(element)>(a, context); });
  return status;
}

}  // namespace kv
