// Observation scores on a CUDA device: two passes over the keys, and the merge of statistics between them. It picks
// the kernels that take these tensors on this device.
#include <algorithm>

#include "kernels/observation-scores/observation-scores-head.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 128;

// Each warp merges the statistics of one query of one head, always in the same order.
__global__ void __launch_bounds__(kThreads)
    merge_statistics(const __grid_constant__ ObservationScoresArguments a, ObservationScoresLaunch launch) {
  const int token = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int query_head = static_cast<int>(blockIdx.y);
  if (token >= a.query_start[a.batch]) return;
  RowStatistics all = {-INFINITY, 0.0f};
  for (int part = lane; part < launch.parts; part += kWarp) {
    all = merged(all, statistics_of(a, launch, part, query_head, token));
  }
  all = merged_across_warp(all);
  // If the query sees no key, infinity makes every weight 0.
  if (lane == 0) log_sum_of(a, launch, query_head, token) = all.sum == 0.0f ? INFINITY : all.reference + log2f(all.sum);
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Status observation_scores_cuda(const ObservationScoresArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.kv_heads == 0) return Status::success();
  int device = 0;
  int major = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return cuda_status(error);

  const bool tensor_cores = major == 9 && sm90a::fits_observation_scores(given);
  const int blocks = multiprocessors * (tensor_cores ? 1 : kBlocksOfMultiprocessor);
  // As many parts as keep the device busy with one entry. The number must not depend on the batch, which would change
  // how an entry's sums are grouped.
  const int parts = std::max(1, blocks / given.kv_heads);
  const size_t rows = static_cast<size_t>(given.query_heads) * static_cast<size_t>(given.query_tokens);
  const size_t tables_bytes = checked_tables_bytes(given);
  const size_t statistics_bytes = rounded_up(static_cast<size_t>(parts) * rows * sizeof(RowStatistics));
  auto* memory =
      static_cast<char*>(context.workspace(tables_bytes + statistics_bytes + rows * sizeof(float)));
  if (memory == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for the softmax's statistics");
  const CheckedTables tables(given, memory);
  // The keys of an entry without rows get scores too: zeros.
  Status status = check_tables_cuda(given, tables, context, true);
  if (!status.ok()) return status;

  const ObservationScoresArguments a = with_tables(given, tables);
  ObservationScoresLaunch launch;
  launch.parts = parts;
  launch.statistics = reinterpret_cast<RowStatistics*>(memory + tables_bytes);
  launch.log_sums = reinterpret_cast<float*>(memory + tables_bytes + statistics_bytes);
  launch.faults = context.faults(describe_observation_scores_fault);
  launch.stream = stream_of(context);
  status = tensor_cores ? sm90a::gather_statistics(a, launch) : gather_statistics(a, launch);
  if (!status.ok()) return status;
  if (a.query_tokens > 0) {
    const dim3 merges(static_cast<unsigned>((a.query_tokens * kWarp + kThreads - 1) / kThreads),
                      static_cast<unsigned>(a.query_heads));
    merge_statistics<<<merges, kThreads, 0, launch.stream>>>(a, launch);
  }
  status = launch_status();
  if (!status.ok()) return status;
  return tensor_cores ? sm90a::add_up_weights(a, launch) : add_up_weights(a, launch);
}

}  // namespace kv
