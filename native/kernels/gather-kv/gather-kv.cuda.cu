// A thread block moves the same slice of bytes of every kept key or value of a head. Many thread blocks can thus
// share a head, and none depends on the order of another. Tokens move to the front in place, tile by tile.
#include "kernels/gather-kv/gather-kv.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// For one kv head: refuses a selection that does not ascend, or sets the new count. `moves` is how many tokens must
// move.
__global__ void __launch_bounds__(kThreads) check_selection(GatherKvArguments a, int32_t* moves, FaultSink faults) {
  const int head = static_cast<int>(blockIdx.x);
  const int32_t* indices = a.indices + head * a.index_stride;
  const int32_t count = a.counts[head];
  const int64_t room = int64_t{a.table_width} * a.block_tokens;
  const int32_t held = a.key_counts[head] < room ? a.key_counts[head] : static_cast<int32_t>(room);
  const int32_t* blocks = a.block_table + int64_t{head} * a.table_width;
  const auto named = [&](int32_t token) {
    const int32_t block = blocks[token / a.block_tokens];
    if (block >= 0 && block < a.block_count) return true;
    if (a.outcomes == nullptr) report_fault(faults, PagedFault::block_out_of_range, block);
    return false;
  };
  bool ascends = true;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
    ascends = ascends && indices[i] > (i == 0 ? -1 : indices[i - 1]) && indices[i] < held && i < held && named(i) &&
              named(indices[i]);
  }
  ascends = __syncthreads_and(ascends);
  if (threadIdx.x != 0) return;
  moves[head] = ascends ? count : 0;
  if (a.outcomes != nullptr) a.outcomes[head] = ascends ? 0 : 1;
  if (ascends || a.outcomes != nullptr) {
    a.key_counts[head] = count < held ? count : held;
  } else {
    report_fault(faults, GatherKvFault::selection_not_ascending, head);
  }
}

// What a thread moves at a time, and how many of these are a slice. A slice is 32 bytes, the size of a memory access.
template <class UnitType>
struct Slice {
  using Unit = UnitType;
  static constexpr int kUnits = static_cast<int>(32 / sizeof(Unit));
};

template <class Slice>
__global__ void __launch_bounds__(kThreads) move_slices(GatherKvArguments a, const int32_t* moves) {
  using Unit = typename Slice::Unit;
  constexpr int kTokens = kThreads / Slice::kUnits;
  constexpr int kBatch = 8;
  const int head = static_cast<int>(blockIdx.z);
  const int32_t* blocks = a.block_table + int64_t{head} * a.table_width;
  const int32_t* indices = a.indices + head * a.index_stride;
  const int32_t count = moves[head];
  const int64_t bytes = static_cast<int64_t>(byte_size(a.cache_dtype));
  const int64_t within = (int64_t{blockIdx.x} * Slice::kUnits + threadIdx.x % Slice::kUnits) * sizeof(Unit);
  const bool inside = within < a.head_dim * bytes;
  char* pool = static_cast<char*>(blockIdx.y == 0 ? a.key_pool : a.value_pool) + within;
  const auto at = [&](int32_t token) {
    const int64_t row = blocks[token / a.block_tokens] * a.block_stride + token % a.block_tokens * a.token_stride;
    return reinterpret_cast<Unit*>(pool + row * bytes);
  };
  // All tokens of a tile are read before any is written. Indices ascend, so the writes of a tile never touch what a
  // later tile reads.
  const int32_t thread_token = static_cast<int32_t>(threadIdx.x) / Slice::kUnits;
  for (int32_t tile = 0; tile < count; tile += kBatch * kTokens) {
    const int32_t first = tile + thread_token;
    Unit held[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (inside && first + i * kTokens < count) held[i] = *at(indices[first + i * kTokens]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (inside && first + i * kTokens < count) *at(first + i * kTokens) = held[i];
    }
  }
}

template <class Slice>
void launch_moves(const GatherKvArguments& a, const int32_t* moves, cudaStream_t stream) {
  const int64_t units = a.head_dim * static_cast<int64_t>(byte_size(a.cache_dtype)) / sizeof(typename Slice::Unit);
  const dim3 blocks(static_cast<unsigned>((units + Slice::kUnits - 1) / Slice::kUnits), 2,
                    static_cast<unsigned>(a.kv_heads));
  move_slices<Slice><<<blocks, kThreads, 0, stream>>>(a, moves);
}

// Whether every row consists of whole, aligned units of `unit` bytes.
bool has_units_of(const GatherKvArguments& a, size_t unit) {
  for (const void* pool : {a.key_pool, a.value_pool}) {
    if (reinterpret_cast<uintptr_t>(pool) % unit != 0) return false;
  }
  for (const int64_t elements : {a.block_stride, a.token_stride, int64_t{a.head_dim}}) {
    if (static_cast<size_t>(elements) * byte_size(a.cache_dtype) % unit != 0) return false;
  }
  return true;
}

}  // namespace

Status gather_kv_cuda(const GatherKvArguments& a, ExecutionContext& context) {
  if (a.kv_heads == 0) return Status::success();
  const cudaStream_t stream = stream_of(context);
  auto* moves = static_cast<int32_t*>(context.workspace(static_cast<size_t>(a.kv_heads) * sizeof(int32_t)));
  if (moves == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for the counts of what moves");
  check_selection<<<static_cast<unsigned>(a.kv_heads), kThreads, 0, stream>>>(a, moves,
                                                                             context.faults(describe_gather_kv_fault));
  if (has_units_of(a, sizeof(uint4))) {
    launch_moves<Slice<uint4>>(a, moves, stream);
  } else if (byte_size(a.cache_dtype) == 4) {
    launch_moves<Slice<uint32_t>>(a, moves, stream);
  } else {
    launch_moves<Slice<uint16_t>>(a, moves, stream);
  }
  return launch_status();
}

}  // namespace kv
