#include "kernels/weighted-values/weighted-values.h"
#include "ptx/dependent-launch.cuda.h"
#include "runtime/queue.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kLaneDims = 4;      // that a thread sums
constexpr int kRowsAtOnce = 16;  // of a piece, on their way over the link
constexpr int kSendThreads = 128;
constexpr int kSendBlocks = 32;  // of a list
constexpr int kSentAtOnce = 4;   // words of a thread

struct Launch {
  WeightedValuesArguments a;
  int32_t most_pieces = 0;  // of a list, that the device sums; 0 if the host sums all
  float* sums = nullptr;    // [list, piece, group_head, dim]
  FaultSink faults;

  __device__ float* sums_of(int64_t list, int32_t piece) const {
    return sums + (list * most_pieces + piece) * a.group * a.head_dim;
  }
};

// The part of a list that the device sums; the host sums what is in front of it.
struct DevicePart {
  int32_t first;  // row
  int32_t rows;

  __device__ DevicePart(const Launch& launch, int64_t list) {
    const int32_t count = launch.a.counts[list];
    const bool counts = count > 0 && count <= launch.a.capacity;  // if not, the host says so
    first = !counts ? 0 : launch.most_pieces == 0 ? count : host_rows(count, launch.a.dtype);
    rows = counts ? count - first : 0;
  }
  __device__ int32_t pieces() const { return (rows + kPieceRows - 1) / kPieceRows; }
};

template <class T>
struct alignas(kLaneDims * sizeof(T)) LaneDims {
  T dims[kLaneDims];
};

// Of so few registers that lists find room on a multiprocessor which the scores of other heads have filled, and sums where one of
// two thread blocks of scores has ended.
constexpr int kBlocksOfRegisters = 16;

template <class T>
__device__ void send(const T* from, T* to, int64_t count, int64_t first, int64_t stride) {
  for (int64_t at = first; at < count; at += kSentAtOnce * stride) {
    T own[kSentAtOnce];
#pragma unroll
    for (int i = 0; i < kSentAtOnce; ++i) {
      if (at + i * stride < count) own[i] = from[at + i * stride];
    }
#pragma unroll
    for (int i = 0; i < kSentAtOnce; ++i) {
      if (at + i * stride < count) to[at + i * stride] = own[i];
    }
  }
}

// Sends the part of each list that the host sums.
__global__ void __launch_bounds__(kSendThreads, kBlocksOfRegisters) send_lists(const __grid_constant__ Launch launch) {
  ptx::let_next_kernel_start();
  const WeightedValuesArguments& a = launch.a;
  const int64_t list = blockIdx.x / kSendBlocks;
  const int64_t thread = blockIdx.x % kSendBlocks * kSendThreads + threadIdx.x;
  if (thread == 0) a.room.counts[list] = a.counts[list];
  const int64_t count = DevicePart(launch, list).first;
  const int64_t first = list * a.capacity;
  send(a.value_rows + first, a.room.value_rows + first, count, thread, kSendBlocks * kSendThreads);
  send(a.weights + first * a.group, a.room.weights + first * a.group, count * a.group, thread, kSendBlocks * kSendThreads);
}

// A thread block of one warp sums a piece for all query heads, in the order of its rows, as the host does.
template <class T, int kGroup>
__global__ void __launch_bounds__(kWarp, kBlocksOfRegisters) sum_pieces(const __grid_constant__ Launch launch) {
  const WeightedValuesArguments& a = launch.a;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t list = blockIdx.x / launch.most_pieces;
  const auto piece = static_cast<int32_t>(blockIdx.x % launch.most_pieces);
  const DevicePart part(launch, list);
  if (piece >= part.pieces()) return;
  const int32_t first = part.first + piece * kPieceRows;
  const int32_t count = min(kPieceRows, part.first + part.rows - first);
  const int64_t listed = list * a.capacity + first;
  // A list in the host's memory comes over the link once, and the piece at once.
  __shared__ int32_t numbers[kPieceRows];
  __shared__ float weights[kPieceRows * kGroup];
  for (int row = lane; row < count; row += kWarp) {
    const int32_t number = a.value_rows[listed + row];
    const bool outside = number < 0 || number >= a.pool_rows;
    if (outside) report_fault(launch.faults, WeightedValuesFault::row_outside, number, list, a.pool_rows);
    numbers[row] = outside ? 0 : number;
  }
  for (int at = lane; at < count * kGroup; at += kWarp) weights[at] = a.weights[listed * kGroup + at];
  __syncwarp();
  for (int dim = lane * kLaneDims; dim < a.head_dim; dim += kWarp * kLaneDims) {
    const T* values = static_cast<const T*>(a.values) + dim;
    float sums[kGroup][kLaneDims] = {};
    for (int row = 0; row < count; row += kRowsAtOnce) {
      LaneDims<T> loaded[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (row + r < count) loaded[r] = *reinterpret_cast<const LaneDims<T>*>(values + int64_t{numbers[row + r]} * a.head_dim);
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (row + r >= count) break;
        for (int h = 0; h < kGroup; ++h) {
          const float weight = weights[(row + r) * kGroup + h];
          for (int d = 0; d < kLaneDims; ++d) sums[h][d] = fmaf(to_float(loaded[r].dims[d]), weight, sums[h][d]);
        }
      }
    }
    float* to = launch.sums_of(list, piece) + dim;
    for (int h = 0; h < kGroup; ++h) {
      for (int d = 0; d < kLaneDims; ++d) to[h * a.head_dim + d] = sums[h][d];
    }
  }
}

// Adds the sums of the pieces, in their order, to what the host has summed of the list in front of them.
__global__ void add_pieces(const __grid_constant__ Launch launch) {
  const WeightedValuesArguments& a = launch.a;
  const int64_t list = blockIdx.x / a.group;
  const int64_t head = blockIdx.x % a.group;
  const int32_t pieces = DevicePart(launch, list).pieces();
  if (pieces == 0) return;
  for (int dim = static_cast<int>(threadIdx.x); dim < a.head_dim; dim += static_cast<int>(blockDim.x)) {
    float& output = a.output[blockIdx.x * int64_t{a.head_dim} + dim];
    float sum = output;
    for (int32_t piece = 0; piece < pieces; ++piece) sum += launch.sums_of(list, piece)[head * a.head_dim + dim];
    output = sum;
  }
}

template <class T>
Status sum_on(cudaStream_t stream, const Launch& launch) {
  const auto run = [&](void (*kernel)(Launch)) {
    kernel<<<static_cast<unsigned>(launch.a.lists() * launch.most_pieces), kWarp, 0, stream>>>(launch);
    return launch_status();
  };
  switch (launch.a.group) {
    case 1:
      return run(sum_pieces<T, 1>);
    case 2:
      return run(sum_pieces<T, 2>);
    case 4:
      return run(sum_pieces<T, 4>);
    default:
      return run(sum_pieces<T, 8>);
  }
}

Status sum_on(cudaStream_t stream, const Launch& launch) {
  if (launch.a.dtype == DType::i8) return sum_on<int8_t>(stream, launch);
  Status status;
  with_cuda_float_type(launch.a.dtype, [&](auto element) { status = sum_on<decltype(element)>(stream, launch); });
  return status;
}

}  // namespace

Status weighted_values_cuda(const SharedValuesArguments& given, ExecutionContext& context) {
  Launch launch{given.a, given.is_shared ? device_pieces(given.a.capacity, given.a.dtype) : 0, nullptr, context.faults(describe_weighted_values_fault)};
  const cudaStream_t stream = stream_of(context);
  cudaStream_t side = nullptr;
  Status status;
  if (given.is_shared) {
    const int64_t floats = given.a.lists() * launch.most_pieces * given.a.group * given.a.head_dim;
    launch.sums = static_cast<float*>(context.workspace(static_cast<size_t>(floats) * sizeof(float)));
    if (launch.sums == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for sums of values");
    side = static_cast<cudaStream_t>(context.queue->side_stream());
    if (side == nullptr) return Status::failure(StatusCode::out_of_memory, "no stream beside the host's part");
    status = run_after(side, stream);
    if (!status.ok()) return status;
    status = sum_on(side, launch);
  }
  if (status.ok() && given.a.room.value_rows != nullptr && given.a.lists() > 0) {
    send_lists<<<static_cast<unsigned>(given.a.lists() * kSendBlocks), kSendThreads, 0, stream>>>(launch);
    status = launch_status();
  }
  if (status.ok()) status = context.queue->run_on_host(given.host_part, context);
  if (!given.is_shared) return status;
  // Even after a failure, so that nothing runs on in memory that goes back.
  const Status joined = run_after(stream, side);
  if (status.ok()) status = joined;
  if (!status.ok()) return status;
  const auto heads = static_cast<unsigned>(given.a.lists() * given.a.group);
  const unsigned threads = given.a.head_dim <= 64 ? 64 : 128;
  add_pieces<<<heads, threads, 0, stream>>>(launch);
  return launch_status();
}

}  // namespace kv
