// The decomposition on a CUDA device: working memory, the checks that only the device can make, and the order of steps.
#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "runtime/device.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {
namespace decomposition {
namespace {

// Whether there are as many rows and keys as the outputs have room for. The tables are checked.
__global__ void check_counts(const __grid_constant__ Launch launch) {
  const DecomposeAttentionArguments& a = launch.a;
  if (threadIdx.x == 0) *launch.memory.fits = 1;
  __syncthreads();
  const int32_t rows = a.query_start[1] - a.query_start[0];
  for (int head = static_cast<int>(threadIdx.x); head <= a.kv_heads; head += static_cast<int>(blockDim.x)) {
    const int32_t count = head < a.kv_heads ? a.key_counts[int64_t{a.slots[0]} * a.kv_heads + head] : rows;
    const int32_t wanted = head < a.kv_heads ? a.tokens : a.rows;
    if (count == wanted) continue;
    report_fault(launch.faults, DecomposeAttentionFault::other_count, count, head < a.kv_heads ? head : -1, wanted);
    *launch.memory.fits = 0;
  }
}

__global__ void make_turns(const __grid_constant__ Launch launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t within = int64_t{kTurnTokens} * a.pairs;
  if (index >= within + int64_t{launch.blocks()} * a.pairs) return;
  const bool base = index >= within;
  const int64_t pair = base ? (index - within) % a.pairs : index / kTurnTokens;
  const int64_t position = base ? (index - within) / a.pairs * kTurnTokens : index % kTurnTokens;
  double2 turn;
  sincos(static_cast<double>(a.inverse_frequencies[pair]) * static_cast<double>(position), &turn.y, &turn.x);
  (base ? launch.memory.bases[index - within] : launch.memory.turns[index]) = turn;
}

// Carves arrays out of one piece of memory; without memory it counts bytes.
class Carver {
 public:
  explicit Carver(char* memory = nullptr) : memory_(memory) {}
  template <class T>
  void take(T*& to, int64_t count) {
    to = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

void carve(Carver& carver, Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  Memory& m = launch.memory;
  const int64_t n = a.coefficients();
  const int64_t sums = int64_t{a.kv_heads} * (launch.runs + 1) * a.head_dim;
  carver.take(m.fits, 1);
  carver.take(m.turns, int64_t{kTurnTokens} * a.pairs);
  carver.take(m.bases, int64_t{launch.blocks()} * a.pairs);
  carver.take(m.moments, sums * a.head_dim);
  carver.take(m.key_sums, sums);
  carver.take(m.plain_sums, sums);
  carver.take(m.mean, int64_t{a.query_heads} * a.rows);
  carver.take(m.variance, int64_t{a.query_heads} * a.rows);
  carver.take(m.log_shape, int64_t{a.query_heads} * a.rows);
  carver.take(m.samples, launch.samples);
  carver.take(m.angles, int64_t{launch.samples} * 2 * a.pairs);
  carver.take(m.regressors, int64_t{a.kv_heads} * launch.samples * n);
  carver.take(m.wanted, int64_t{a.query_heads} * launch.samples);
  carver.take(m.left_out, int64_t{a.kv_heads} * launch.samples);
  carver.take(m.gram_parts, kSplits * int64_t{a.kv_heads} * n * n);
  carver.take(m.right_parts, kSplits * int64_t{a.query_heads} * n);
  carver.take(m.systems, int64_t{a.kv_heads} * (n + a.group()) * n);
  carver.take(m.solutions, int64_t{a.query_heads} * n);
  carver.take(m.middles, int64_t{a.kv_heads} * n);
  carver.take(m.last_rows, int64_t{a.query_heads} * launch.blocks());
  carver.take(m.zetas, a.query_heads);
  carver.take(m.slash_sums, int64_t{a.query_heads} * (a.tokens + 1));
  carver.take(m.vertical_sums, int64_t{a.query_heads} * (a.tokens + 1));
}

}  // namespace
}  // namespace decomposition

Status decompose_attention_cuda(const DecomposeAttentionArguments& given, ExecutionContext& context) {
  using namespace decomposition;
  if (given.head_dim > kMostDims) {
    return Status::failure(StatusCode::capability, "on CUDA attention is decomposed for heads of up to 256 dims");
  }
  const Interior interior(given);
  Launch launch{given, {}, (given.rows + kRunTokens - 1) / kRunTokens, interior.own_samples(given.samples), 0,
                context.faults(describe_decompose_attention_fault), stream_of(context)};
  if (launch.samples > 0) launch.weight = static_cast<double>(interior.own_elements()) / launch.samples;
  Carver counting;
  carve(counting, launch);
  const size_t tables_bytes = checked_tables_bytes(given);
  auto* memory = static_cast<char*>(context.queue->workspace(tables_bytes + counting.bytes()));
  if (memory == nullptr) return Status::failure(StatusCode::out_of_memory, "no room to decompose attention in");
  const CheckedTables tables(given, memory);
  Status status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  launch.a = with_tables(given, tables);
  Carver carver(memory + tables_bytes);
  carve(carver, launch);
  check_counts<<<1, kThreads, 0, launch.stream>>>(launch);
  const int64_t turns = int64_t{kTurnTokens + launch.blocks()} * given.pairs;
  make_turns<<<static_cast<unsigned>((turns + kThreads - 1) / kThreads), kThreads, 0, launch.stream>>>(launch);
  status = launch_status();
  if (status.ok()) status = add_keys_and_rows(launch);
  if (status.ok()) status = solve_least_squares(launch);
  if (status.ok()) status = write_parts(launch);
  return status;
}

}  // namespace kv
