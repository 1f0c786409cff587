// A thread encodes the codes of one stream, and a warp those of a chunk. Where all groups share a book of sub-vectors of two
// or four dims, the thread block keeps what it searches in shared memory, for as many blocks of one kv head as follow each
// other. Any other sub-vector is compared with every centroid.
#include "kernels/encode-keys/encode-keys.cuda.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv {
namespace {

using cuda::clear_spoilt;
using cuda::distance_of_four;
using cuda::floats;
using cuda::square;
using cuda::StreamWriter;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

// One book, and the parts of its index, in global or in shared memory.
struct Book {
  const uint16_t* centroids;
  const uint8_t* first;
  const uint8_t* second;
  const uint8_t* third;
  int most_chunks;
  int count;
  IndexHeader header;
};

__device__ Book book_of(const EncodeKeysArguments& a, int head, int group) {
  const IndexShape shape(a.centroid_count, a.sub_dim);
  const uint8_t* index = a.index + a.book_offset(head, group) / a.book_elements() * shape.bytes();
  Book book{a.centroids + a.book_offset(head, group), index + kIndexHeaderBytes, index + shape.second(),
            index + shape.third(), shape.most_chunks, a.centroid_count, *reinterpret_cast<const IndexHeader*>(index)};
  const bool boxes = a.sub_dim > kMostListedDims;
  if (book.header.levels > shape.most_levels || (boxes && book.header.levels < shape.most_levels)) book.header.levels = -1;
  return book;
}

// Of `kSubDim` dims, or of any number if that is 0.
template <int kSubDim>
class Search {
 public:
  __device__ Search(const Book& book, int sub_dim) : book_(book), dims_(kSubDim == 0 ? sub_dim : kSubDim) {}

  // `x` is [dims]. Below 0 if none is near.
  __device__ int nearest(const float* x) {
    if (!indexed(x)) {
      for (int c = 0; c < book_.count; ++c) compare(distance(x, book_.centroids, c), c);
    } else if constexpr (kSubDim == 2) {
      search_lists(x);
    } else if constexpr (kSubDim == 4) {
      search_boxes(x);
    }
    return code_;
  }

 private:
  // What an index says is checked where it could lead outside of memory, for it may hold anything.
  __device__ bool indexed(const float* x) const {
    if (kSubDim == 0 || book_.header.levels < 0) return false;
    bool inside = true;
    if constexpr (kSubDim == 2) {
#pragma unroll
      for (int d = 0; d < 2; ++d) inside = inside && x[d] >= book_.header.lowest[d] && x[d] <= book_.header.highest[d];
    }
    return inside;
  }

  __device__ void search_lists(const float* x) {
    int node = 0;
    for (int level = 0; level < book_.header.levels; ++level) {
      const float split = reinterpret_cast<const float*>(book_.first)[node];
      const float along = __float_as_uint(split) % 2 == 1 ? x[1] : x[0];
      node = 2 * node + (along < split ? 1 : 2);
    }
    int chunk = node + 1 - (1 << book_.header.levels);
    while (true) {
      const uint4 entries = reinterpret_cast<const uint4*>(book_.second)[chunk];
      const uint32_t words[4] = {entries.x, entries.y, entries.z, entries.w};
#pragma unroll
      for (int i = 0; i < kChunkCentroids; ++i) {
        const int centroid = min(static_cast<int>(words[i / 2] >> 16 * (i % 2) & 0xffffu), book_.count - 1);
        compare(distance(x, book_.centroids, centroid), centroid);
      }
      const int next = static_cast<int>(words[3] >> 16);
      if (next <= chunk || next >= book_.most_chunks) return;
      chunk = next;
    }
  }

  __device__ void search_boxes(const float* x) {
    // The leaf of the nearer box at each level has a centroid that is near, if not the nearest.
    int near = 0;
    for (int level = 0; level < book_.header.levels; ++level) {
      const int first = 2 * near + 1;
      near = distance_of_box(x, first) <= distance_of_box(x, first + 1) ? first : first + 1;
    }
    scan(x, near + 1 - (1 << book_.header.levels));
    BoxWalk walk(book_.header.levels);
    // All lanes go on to a leaf each before they scan theirs.
    while (true) {
      while (!walk.done()) {
        if (certainly_further(distance_of_box(x, walk.node()), best_)) {
          walk.pass();
        } else if (walk.at_leaf()) {
          break;
        } else {
          walk.enter();
        }
      }
      if (walk.done()) return;
      scan(x, walk.leaf);
      walk.pass();
    }
  }

  __device__ float distance_of_box(const float* x, int node) const {
    const uint4 box = reinterpret_cast<const uint4*>(book_.first)[node];
    const float2 lowest[2] = {floats(box.x), floats(box.y)};
    const float2 highest[2] = {floats(box.z), floats(box.w)};
    float distance = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = fmaxf(fmaxf(lowest[i].x - x[2 * i], x[2 * i] - highest[i].x), 0.0f);
      const float second = fmaxf(fmaxf(lowest[i].y - x[2 * i + 1], x[2 * i + 1] - highest[i].y), 0.0f);
      distance += first * first + second * second;
    }
    return distance;
  }

  // Each lane begins with another centroid, so that lanes at other leaves read other banks.
  __device__ void scan(const float* x, int leaf) {
    const auto place = [&](int of_leaf) { return static_cast<int>(int64_t{book_.count} * of_leaf >> book_.header.levels); };
    const int first = place(leaf);
    const int count = place(leaf + 1) - first;
#pragma unroll
    for (int i = 0; i < kLeafCentroids; ++i) {
      const int own = static_cast<int>(i + threadIdx.x) % kLeafCentroids;
      if (own >= count) continue;
      const float far = distance(x, reinterpret_cast<const uint16_t*>(book_.third), first + own);
      if (far > best_) continue;
      const int number = min(static_cast<int>(reinterpret_cast<const uint16_t*>(book_.second)[first + own]), book_.count - 1);
      if (far < best_ || (far == best_ && number < code_)) best_ = far, code_ = number;
    }
  }

  // Of the number-th of the centroids.
  __device__ float distance(const float* x, const uint16_t* centroids, int number) const {
    if constexpr (kSubDim == 2) {
      const float2 c = floats(reinterpret_cast<const uint32_t*>(centroids)[number]);
      return __fadd_rn(square(x[0], c.x), square(x[1], c.y));
    } else if constexpr (kSubDim == 4) {
      return distance_of_four(x, reinterpret_cast<const uint2*>(centroids)[number]);
    } else {
      float sum = 0;
      for (int d = 0; d < dims_; ++d) sum = __fadd_rn(sum, square(x[d], half_value(centroids[number * dims_ + d])));
      return sum;
    }
  }

  // Of centroids in ascending order.
  __device__ void compare(float distance, int centroid) {
    if (distance < best_) best_ = distance, code_ = centroid;
  }

  const Book& book_;
  const int dims_;
  float best_ = INFINITY;
  int code_ = -1;
};

// Writes the codes of a stream: eight tokens of a quad, from `quad_group` on.
template <class T, int kSubDim, class BookOfGroup>
__device__ void encode_stream(const EncodeKeysArguments& a, const T* dense, int head, int octet, int quad_group,
                              StreamWriter writer, BookOfGroup&& book_of_group) {
  constexpr int kRoom = kSubDim == 0 ? kMostCodedDims : kSubDim;
  const int sub_dim = kSubDim == 0 ? a.sub_dim : kSubDim;
  const float* scales = a.channel_scale == nullptr ? nullptr : a.channel_scale + int64_t{head} * a.head_dim;
  for (int place = 0; place < kStreamCodes; ++place) {
    const int token = token_of(octet, place);
    const int group = quad_group + group_of(place);
    int code = 0;
    if (group < a.groups()) {
      const T* from = dense + token * a.token_stride + group * sub_dim;
      float x[kRoom];
#pragma unroll 4
      for (int d = 0; d < sub_dim; ++d) {
        x[d] = to_float(from[d]);
        if (scales != nullptr) x[d] = __fdiv_rn(x[d], scales[group * sub_dim + d]);
      }
      code = Search<kSubDim>(book_of_group(group), sub_dim).nearest(x);
    }
    writer.write(code, token);
  }
}

template <class T, int kSubDim, class BookOfGroup>
__device__ void encode_chunk(const EncodeKeysArguments& a, int copy, int chunk, BookOfGroup&& book_of_group) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int quads = quads_of_chunk(a.groups(), chunk);
  const int step = kChunkOctets * quads;
  if (lane >= step) return;
  encode_stream<T, kSubDim>(a, static_cast<const T*>(a.keys) + a.from[copy] * a.block_stride, a.heads[copy], lane / quads,
                            chunk * kChunkGroups + lane % quads * kQuadGroups, StreamWriter(a, copy, chunk, lane, step), book_of_group);
}

// ---- One book of all groups, in shared memory. ----

__device__ void fetch(uint4* to, const void* from, int64_t bytes) {
  for (int64_t i = threadIdx.x; i * 16 < bytes; i += kThreads) to[i] = static_cast<const uint4*>(from)[i];
}

// The shared part: of two dims the splits, then the centroids; of four the whole index.
template <int kSubDim>
int64_t shared_bytes(int centroids) {
  const IndexShape shape(centroids, kSubDim);
  return kSubDim == 2 ? shape.first_bytes + int64_t{centroids} * kSubDim * 2 : shape.bytes() - kIndexHeaderBytes;
}

template <int kSubDim>
__device__ void fetch_book(Book& book, uint4* memory) {
  const IndexShape shape(book.count, kSubDim);
  auto* bytes = reinterpret_cast<uint8_t*>(memory);
  if constexpr (kSubDim == 2) {
    fetch(memory, book.first, shape.first_bytes);
    fetch(memory + shape.first_bytes / 16, book.centroids, int64_t{book.count} * kSubDim * 2);
    book.centroids = reinterpret_cast<const uint16_t*>(bytes + shape.first_bytes);
  } else {
    fetch(memory, book.first, shape.bytes() - kIndexHeaderBytes);
    book.second = bytes + shape.first_bytes;
    book.third = book.second + shape.second_bytes;
  }
  book.first = bytes;
}

// Each thread block encodes a run of the copies.
template <class T, int kSubDim>
__global__ void __launch_bounds__(kThreads, 2) encode_with_shared_book(const __grid_constant__ EncodeKeysArguments a) {
  extern __shared__ uint4 memory[];
  const int chunks = coded_chunks(a.groups());
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int copy = static_cast<int>(int64_t{a.copies} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{a.copies} * (blockIdx.x + 1) / gridDim.x);
  for (int i = copy + static_cast<int>(threadIdx.x); i < end; i += kThreads) clear_spoilt(a, i);
  while (copy < end) {
    const int head = a.heads[copy];
    int last = copy + 1;
    while (last < end && a.heads[last] == head) ++last;
    Book book = book_of(a, head, 0);
    __syncthreads();
    fetch_book<kSubDim>(book, memory);
    __syncthreads();
    for (int unit = warp; unit < (last - copy) * chunks; unit += kWarps) {
      encode_chunk<T, kSubDim>(a, copy + unit / chunks, unit % chunks, [&](int) -> const Book& { return book; });
    }
    copy = last;
  }
}

template <class T, int kSubDim>
Status launch_with_shared_book(const EncodeKeysArguments& a, int multiprocessors, ExecutionContext& context) {
  const auto kernel = encode_with_shared_book<T, kSubDim>;
  const auto bytes = static_cast<int>(shared_bytes<kSubDim>(a.centroid_count));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
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
  if (threadIdx.x == 0) clear_spoilt(a, static_cast<int>(blockIdx.x));
  __syncthreads();
  for (int chunk = static_cast<int>(threadIdx.x) / kWarp; chunk < chunks; chunk += kWarps) {
    encode_chunk<T, 0>(a, static_cast<int>(blockIdx.x), chunk, [&](int group) { return book_of(a, head, group); });
  }
}

template <class T>
Status launch(const EncodeKeysArguments& a, ExecutionContext& context) {
  int device = 0, multiprocessors = 0, most_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return cuda_status(error);
  // Books are read 16 bytes at a time.
  const bool shared = a.books == 1 && a.book_elements() % 8 == 0 && reinterpret_cast<uintptr_t>(a.centroids) % 16 == 0;
  const auto fits = [&](int sub_dim, int64_t bytes) { return shared && a.sub_dim == sub_dim && bytes <= most_bytes; };
  if (fits(2, shared_bytes<2>(a.centroid_count))) return launch_with_shared_book<T, 2>(a, multiprocessors, context);
  if (fits(4, shared_bytes<4>(a.centroid_count))) return launch_with_shared_book<T, 4>(a, multiprocessors, context);
  encode_any<T><<<static_cast<unsigned>(a.copies), kThreads, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace

Status encode_keys_cuda(const EncodeKeysArguments& a, ExecutionContext& context) {
  if (cuda::fits_encode_keys_cells(a)) return cuda::encode_keys_cells(a, context);
  Status status = Status::success();
  with_cuda_float_type(a.dtype, [&](auto element) { status = launch<decltype(element)>(a, context); });
  return status;
}

}  // namespace kv
