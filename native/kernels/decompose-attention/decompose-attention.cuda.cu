// The decomposition on a CUDA device: working memory, the checks that only the device can make, and the order of steps.
#include <algorithm>
#include <string>

#include "kernels/decompose-attention/decompose-attention-key-block.cuda.h"
#include "runtime/queue.cuda.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {
namespace decomposition {
namespace {

// Whether there are as many rows and keys as the outputs have room for. The tables are checked. No sample is left out so far.
__device__ void check_counts(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  if (threadIdx.x == 0) *launch.memory.fits = 1;
  __syncthreads();
  const int32_t rows = a.query_start[1] - a.query_start[0];
  for (int head = static_cast<int>(threadIdx.x); head <= a.kv_heads; head += static_cast<int>(blockDim.x)) {
    const int32_t count = head < a.kv_heads ? a.key_counts[int64_t{a.slots[0]} * a.kv_heads + head] : rows;
    const int32_t wanted = head < a.kv_heads ? a.tokens : a.rows;
    if (head < a.kv_heads) launch.memory.left_out[head] = 0;
    if (count == wanted) continue;
    report_fault(launch.faults, DecomposeAttentionFault::other_count, count, head < a.kv_heads ? head : -1, wanted);
    *launch.memory.fits = 0;
  }
}

// One thread for each pair of each position below kTurnTokens, and of each kTurnTokens-th one. The last thread block
// checks counts.
__global__ void __launch_bounds__(kThreads) start(const __grid_constant__ Launch launch) {
  if (blockIdx.x == gridDim.x - 1) return check_counts(launch);
  const DecomposeAttentionArguments& a = launch.a;
  const Memory& memory = launch.memory;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = index / a.pairs;
  const int pair = static_cast<int>(index % a.pairs);
  if (row >= kTurnTokens + launch.blocks()) return;
  const bool within = row < kTurnTokens;
  const int64_t position = within ? row : (row - kTurnTokens) * kTurnTokens;
  double2 turn;
  sincos(static_cast<double>(a.inverse_frequencies[pair]) * static_cast<double>(position), &turn.y, &turn.x);
  if (!within) {
    memory.bases[(row - kTurnTokens) * a.pairs + pair] = turn;
    return;
  }
  memory.turns[pair * kTurnTokens + row] = turn;
  memory.turns_of_pair[pair * kTurnTokens + row] = memory.turns_of_key[index] =
      make_float2(static_cast<float>(turn.x), static_cast<float>(turn.y));
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
  const int64_t runs = launch.hopper ? 0 : int64_t{a.kv_heads} * ((launch.tensor_cores ? launch.kept_tiles() : launch.runs) + 1);
  carver.take(m.fits, 1);
  carver.take(m.turns, int64_t{kTurnTokens} * a.pairs);
  carver.take(m.bases, int64_t{launch.blocks()} * a.pairs);
  carver.take(m.turns_of_pair, int64_t{kTurnTokens} * a.pairs);
  carver.take(m.turns_of_key, int64_t{kTurnTokens} * a.pairs);
  carver.take(m.key_sums, int64_t{a.kv_heads} * launch.key_blocks() * 2 * a.head_dim);
  carver.take(m.moments, runs * a.head_dim * a.head_dim);
  if (launch.tensor_cores) {
    const int64_t tiles = int64_t{a.kv_heads} * launch.kept_tiles();
    carver.take(m.tile_sums, runs * a.head_dim);
    if (launch.hopper) {
      carver.take(m.chunk_sums, int64_t{a.kv_heads} * launch.chunks() * Launch::chunk_values(a.head_dim));
      carver.take(m.segment_sums, int64_t{a.kv_heads} * a.head_dim);
    }
    carver.take(m.covariances, tiles * static_cast<int64_t>(covariance_bytes(a)));
    carver.take(m.tile_means, tiles * a.head_dim);
    carver.take(m.tile_scales, tiles);
  }
  carver.take(m.last_means, a.query_heads);
  carver.take(m.variance, int64_t{a.query_heads} * a.rows);
  carver.take(m.log_shape, int64_t{a.query_heads} * a.rows);
  carver.take(m.samples, launch.samples);
  carver.take(m.first_samples, launch.sampled_blocks(Interior(a)) + 1);
  carver.take(m.angles, int64_t{launch.samples} * 2 * a.pairs);
  carver.take(m.lines, int64_t{a.kv_heads} * launch.samples * launch.line_values());
  carver.take(m.kept, int64_t{a.kv_heads} * launch.samples);
  carver.take(m.left_out, a.kv_heads);
  carver.take(m.gram_parts, launch.splits() * int64_t{a.kv_heads + 1} * (n + a.group()) * n);
  carver.take(m.systems, int64_t{a.kv_heads} * (n + a.group()) * n);
  carver.take(m.factors, a.kv_heads * launch.factor_values());
  carver.take(m.solutions, int64_t{a.query_heads} * n);
  carver.take(m.middles, int64_t{a.kv_heads} * n);
  carver.take(m.offsets, a.query_heads);
  carver.take(m.last_rows, int64_t{a.query_heads} * launch.blocks());
  carver.take(m.zetas, a.query_heads);
  carver.take(m.slash_sums, int64_t{a.query_heads} * (a.tokens + 1));
  carver.take(m.vertical_sums, int64_t{a.query_heads} * (a.tokens + 1));
  carver.take(m.block_sums, int64_t{2} * a.query_heads * launch.blocks());
}

}  // namespace

size_t shared_memory_of_block() {
  int device = 0;
  int bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess ? static_cast<size_t>(bytes) : 0;
}

}  // namespace decomposition

Status decompose_attention_cuda(const DecomposeAttentionArguments& given, ExecutionContext& context) {
  using namespace decomposition;
  if (given.head_dim > kMostDims) {
    return Status::failure(StatusCode::capability, "on CUDA attention is decomposed for heads of up to 256 dims");
  }
  size_t needed = solver_bytes(given);
  with_cuda_float_type(given.cache_dtype, [&](auto element) { needed = std::max(needed, KeyBlock<decltype(element)>::bytes(given)); });
  if (needed > shared_memory_of_block()) {
    return Status::failure(StatusCode::capability, "heads of " + std::to_string(given.head_dim) + " dims, " +
                                                       std::to_string(2 * given.pairs) + " of them rotated, need " +
                                                       std::to_string(needed) + " bytes of shared memory; this GPU has " +
                                                       std::to_string(shared_memory_of_block()));
  }
  int major = 0;
  Status status = find_compute_capability(major);
  if (!status.ok()) return status;
  const Interior interior(given);
  Launch launch{given, {}, 0, 0, interior.own_samples(given.samples), 0, fits_tensor_cores(given), false,
                context.faults(describe_decompose_attention_fault), stream_of(context)};
  launch.hopper = launch.tensor_cores && major == 9;
  launch.runs = (given.rows + launch.run_tokens() - 1) / launch.run_tokens();
  if (launch.samples > 0) launch.weight = static_cast<double>(interior.own_elements()) / launch.samples;
  Carver counting;
  carve(counting, launch);
  const size_t tables_bytes = checked_tables_bytes(given);
  auto* memory = static_cast<char*>(context.workspace(tables_bytes + counting.bytes()));
  if (memory == nullptr) return Status::failure(StatusCode::out_of_memory, "no room to decompose attention in");
  const CheckedTables tables(given, memory);
  status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  launch.a = with_tables(given, tables);
  Carver carver(memory + tables_bytes);
  carve(carver, launch);
  const int64_t turns = int64_t{kTurnTokens + launch.blocks()} * given.pairs;
  start<<<static_cast<unsigned>((turns + kThreads - 1) / kThreads + 1), kThreads, 0, launch.stream>>>(launch);
  status = launch_status();
  if (!status.ok()) return status;

  // The rows need all of the device, samples and their solution little of it for long.
  Launch beside = launch;
  if (void* side = context.queue->side_stream()) beside.stream = static_cast<cudaStream_t>(side);
  const auto join = [&](cudaStream_t later, cudaStream_t earlier) {
    return later == earlier ? Status::success() : run_after(later, earlier);
  };
  status = join(beside.stream, launch.stream);
  if (!status.ok()) return status;
  status = choose_samples(beside);
  if (status.ok()) status = add_keys(launch);
  if (status.ok()) status = join(beside.stream, launch.stream);
  if (status.ok()) status = add_samples(beside);
  if (status.ok()) status = solve_least_squares(beside);
  if (status.ok()) status = launch.tensor_cores ? add_rows_mma(launch) : add_rows(launch);
  if (status.ok()) status = write_vertical(beside);
  if (status.ok()) status = write_slash(beside);
  // Even after a failure, so that nothing runs on in memory that goes back.
  const Status joined = join(launch.stream, beside.stream);
  if (status.ok()) status = joined;
  if (status.ok()) status = write_horizontal(launch);
  return status;
}

}  // namespace kv
