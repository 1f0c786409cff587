// Of a decode step, whose entries have one row each: a thread block turns the queries of a kv head and its key, and appends
// the key and the value. One kernel in place of two, whose reads do not wait for each other. Row, position and angle are read
// while the kernels ahead may still change them; what has changed by the end of these is done again.
#include "kernels/append-kv/append-kv-rope.cuda.h"

#include "kernels/append-kv/append-kv-tables.cuda.h"
#include "kernels/rope/rope-pair.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;
constexpr int kMostHeads = 16;  // the queries of a kv head and its key

// Not in line: there is one copy of its code, for what is computed early and for what is not.
__device__ __noinline__ Turn turn_apart(int32_t position, float inverse_frequency, float attention_scale) {
  return turn_by(position, inverse_frequency, attention_scale);
}

// A thread has one pair of every kThreads / kPairs-th head, and one dim of the value. The first kPairs have an angle each.
template <class T, int kPairs>
class Row {
 public:
  __device__ Row(const AppendKvArguments& a, int head)
      : a_(a),
        head_(head),
        group_(static_cast<int>(a.turned_queries.heads) / a.kv_heads),
        first_(first_of(a.turned_keys, pair())),
        second_(second_of(a.turned_keys, pair())) {}

  // While the kernels ahead may still write there.
  __device__ void turn_ahead(int64_t token) {
    if (thread() >= kPairs) return;
    const RopeArguments& rope = a_.turned_keys;
    position_ = __ldcg(rope.positions + token);
    inverse_frequency_ = __ldcg(rope.inverse_frequencies + thread());
    turn_ = turn_apart(position_, inverse_frequency_, rope.attention_scale);
  }

  __device__ void turn(int64_t token, Turn (&turns)[kPairs]) {
    if (thread() >= kPairs) return;
    const RopeArguments& rope = a_.turned_keys;
    const int32_t position = rope.positions[token];
    const float inverse_frequency = rope.inverse_frequencies[thread()];
    if (position != position_ || inverse_frequency != inverse_frequency_) {
      turn_ = turn_apart(position, inverse_frequency, rope.attention_scale);
    }
    turns[thread()] = turn_;
  }

  __device__ void read(int64_t token) {
    token_ = token;
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) {
      if (own_head(i) <= group_) pairs_[i] = {row(i)[first_], row(i)[second_]};
    }
    const int64_t value_at = token * a_.row_token_stride + head_ * a_.row_head_stride + thread();
    if (thread() < 2 * kPairs) value_ = static_cast<const T*>(a_.values)[value_at];
  }

  // `to` is where the token's key and value begin in the pools.
  __device__ void write(const Turn (&turns)[kPairs], int64_t to) const {
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) {
      if (own_head(i) > group_) continue;
      const Pair<T> after = turned(pairs_[i], turns[pair()]);
      row(i)[first_] = after.first;
      row(i)[second_] = after.second;
      if (own_head(i) < group_) continue;
      static_cast<T*>(a_.key_pool)[to + first_] = after.first;
      static_cast<T*>(a_.key_pool)[to + second_] = after.second;
    }
    if (thread() < 2 * kPairs) static_cast<T*>(a_.value_pool)[to + thread()] = value_;
  }

 private:
  static constexpr int kHeadsAtOnce = kThreads / kPairs;
  static constexpr int kHeadsOfThread = kMostHeads / kHeadsAtOnce;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int pair() { return thread() % kPairs; }
  // Of the kv head's queries; the key follows them.
  __device__ static int own_head(int i) { return thread() / kPairs + i * kHeadsAtOnce; }

  __device__ T* row(int i) const {
    const bool is_key = own_head(i) == group_;
    const RopeArguments& rows = is_key ? a_.turned_keys : a_.turned_queries;
    return static_cast<T*>(rows.output) + token_ * rows.output_token_stride +
           (is_key ? head_ : head_ * group_ + own_head(i)) * rows.output_head_stride;
  }

  const AppendKvArguments& a_;
  const int head_;
  const int group_;
  const int64_t first_;
  const int64_t second_;
  int64_t token_ = 0;
  Pair<T> pairs_[kHeadsOfThread];
  T value_{};
  int32_t position_ = 0;
  float inverse_frequency_ = 0;
  Turn turn_{};
};

// An entry may have no row, or several where others have none.
template <class T, int kPairs>
__global__ void __launch_bounds__(kThreads) turn_and_append(const __grid_constant__ AppendKvArguments a, FaultSink faults) {
  __shared__ Turn turns[kPairs];
  ptx::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.x);
  const int entry = static_cast<int>(blockIdx.y);
  const auto inside = [&a](int32_t token) { return min(max(token, 0), a.query_tokens - 1); };
  const int32_t begin_ahead = inside(__ldcg(a.query_start + entry));
  const TablesAhead tables = prefetch_tables(a, entry, head);
  Row<T, kPairs> row(a, head);
  row.turn_ahead(begin_ahead);
  ptx::wait_for_previous_kernel();
  // The first row is read before the tables are checked, so that the reads do not wait for each other.
  fetch_tables(tables);
  row.read(begin_ahead);
  const int32_t begin = inside(a.query_start[entry]);
  if (begin != begin_ahead) row.read(begin);
  row.turn(begin, turns);
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  if (!__syncthreads_and(looks_sound(a, entry, cache_head, faults))) return;
  const int32_t rows = a.query_start[entry + 1] - begin;
  const int32_t count = a.key_counts[cache_head];
  for (int32_t i = 0; i < rows; ++i) {
    if (i > 0) {
      __syncthreads();  // all threads are done with the turns of the row before
      row.read(begin + i);
      row.turn(begin + i, turns);
      __syncthreads();
    }
    const int32_t place = count + i;
    const int64_t block = a.block_table[cache_head * a.table_width + place / a.block_tokens];
    row.write(turns, block * a.block_stride + place % a.block_tokens * a.token_stride);
  }
  __syncthreads();  // after this, all threads have read the count
  if (threadIdx.x == 0) a.key_counts[cache_head] = count + rows;
}

template <class T>
Status launch(const AppendKvArguments& a, ExecutionContext& context) {
  const dim3 blocks(static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
  return launch_overlapped(a.head_dim == 64 ? turn_and_append<T, 32> : turn_and_append<T, 64>, blocks, kThreads, 0,
                           stream_of(context), a, context.faults(describe_append_kv_fault));
}

}  // namespace

bool fits_append_kv_rope(const AppendKvArguments& a) {
  const bool of_16_bits = a.row_dtype == a.cache_dtype && a.row_dtype != DType::f32;
  const int64_t queries = a.turned_queries.heads;
  return a.turns && of_16_bits && a.query_tokens <= a.batch && (a.head_dim == 64 || a.head_dim == 128) &&
         2 * a.turned_keys.pairs == a.head_dim && a.turned_queries.dtype == a.row_dtype && queries % a.kv_heads == 0 &&
         queries / a.kv_heads < kMostHeads;
}

Status append_kv_rope(const AppendKvArguments& a, ExecutionContext& context) {
  return a.row_dtype == DType::f16 ? launch<__half>(a, context) : launch<__nv_bfloat16>(a, context);
}

}  // namespace kv
