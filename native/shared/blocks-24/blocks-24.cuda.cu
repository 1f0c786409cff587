#include "shared/blocks-24/blocks-24.cuda.h"

#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/check-tables.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {
namespace {

// The index map and the pools of one operand, keys or values.
struct IndexMap {
  const int32_t* entries;
  int32_t dense_count;
  int32_t sparse_count;

  __device__ bool check(int64_t place, bool whole, FaultSink faults) const {
    const int32_t entry = entries[place];
    if (names_dense(entry, dense_count)) return true;
    if (names_block(entry, BlockKind::sparse_24, sparse_count) && whole) return true;
    report_fault(faults, PagedFault::block_out_of_range, entry);
    return false;
  }
};

struct IndexMaps {
  IndexMap keys;
  IndexMap values;

  __device__ bool check(int64_t place, bool whole, FaultSink faults) const {
    return keys.check(place, whole, faults) && values.check(place, whole, faults);
  }
};

}  // namespace

Status check_tables_cuda(const Attention24Arguments& a, const CheckedTables& tables, ExecutionContext& context) {
  const IndexMaps maps{{a.block_table, a.block_count, a.has_sparse_keys ? a.sparse_keys.block_count : 0},
                       {a.value_table, a.block_count, a.has_sparse_values ? a.sparse_values.block_count : 0}};
  const dim3 blocks(static_cast<unsigned>(a.batch), static_cast<unsigned>(a.kv_heads));
  return launch_overlapped(check_tables<IndexMaps>, blocks, kCheckThreads, 0, stream_of(context),
                           TableCheck{a, tables, context.faults(describe_paged_fault), false}, maps);
}

}  // namespace kv
