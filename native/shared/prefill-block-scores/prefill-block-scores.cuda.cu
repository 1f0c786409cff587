#include "shared/prefill-block-scores/prefill-block-scores.cuda.h"

#include "shared/paged/paged-attention.cuda.h"

namespace kv {
namespace {

constexpr size_t kFitsBytes = 256;
constexpr int kCheckThreads = 256;

__global__ void check_counts(const __grid_constant__ PrefillBlockScoresArguments a, int32_t* fits,
                             const __grid_constant__ FaultSink faults) {
  if (threadIdx.x == 0) *fits = 1;
  __syncthreads();
  const int32_t rows = a.query_start[1] - a.query_start[0];
  for (int head = static_cast<int>(threadIdx.x); head <= a.kv_heads; head += static_cast<int>(blockDim.x)) {
    const bool keys = head < a.kv_heads;
    const int32_t count = keys ? a.key_counts[int64_t{a.slots[0]} * a.kv_heads + head] : rows;
    const int32_t of_part = keys ? kScoredBlockKeys : kScoredTileRows;
    const int32_t parts = keys ? a.blocks : a.tiles;
    if ((count + of_part - 1) / of_part == parts && count >= rows) continue;
    report_fault(faults, BlockScoresFault::other_count, count, keys ? head : -1, parts);
    *fits = 0;
  }
}

}  // namespace

Status prepare_block_scores_cuda(PrefillBlockScoresArguments& a, size_t bytes, ExecutionContext& context,
                                 BlockScoresMemory& memory) {
  const size_t tables_bytes = checked_tables_bytes(a);
  auto* all = static_cast<char*>(context.workspace(tables_bytes + kFitsBytes + bytes));
  if (all == nullptr) return Status::failure(StatusCode::out_of_memory, "no room to estimate block scores in");
  const CheckedTables tables(a, all);
  const Status status = check_tables_cuda(a, tables, context);
  if (!status.ok()) return status;
  a = with_tables(a, tables);
  auto* fits = reinterpret_cast<int32_t*>(all + tables_bytes);
  memory = {fits, all + tables_bytes + kFitsBytes};
  check_counts<<<1, kCheckThreads, 0, stream_of(context)>>>(a, fits, context.faults(describe_block_scores_fault));
  return launch_status();
}

}  // namespace kv
