#include "kernels/write-entries/write-entries.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) write_each(WriteEntriesArguments a) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < a.count) a.table[a.at[i]] = a.entries[i];
}

}  // namespace

Status write_entries_cuda(const WriteEntriesArguments& a, ExecutionContext& context) {
  const auto blocks = (static_cast<unsigned>(a.count) + kThreads - 1) / kThreads;
  write_each<<<blocks, kThreads, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace kv
