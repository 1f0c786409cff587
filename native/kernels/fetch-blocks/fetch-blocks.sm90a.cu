// Loads by TMA, straight from host memory: one thread of each of few thread blocks keeps a ring of pieces under way, to
// shared memory and on to the device's. It takes nothing of the multiprocessors' arithmetic from what runs beside it.
#include "kernels/fetch-blocks/fetch-blocks.cuda.h"
#include "ptx/bulk-copy.cuda.h"
#include "ptx/mbarrier.cuda.h"
#include "runtime/check.cuda.h"
#include "runtime/fault.h"

namespace kv::cuda {
namespace {

constexpr unsigned kThreadBlocks = 4;
constexpr int kPieceBytes = 8 * 1024;
constexpr int kStages = 12;
constexpr int kStoring = 3;  // pieces that may be on their way out of shared memory
constexpr int kLoading = kStages - kStoring;

struct SharedStorage {
  alignas(128) unsigned char pieces[kStages][kPieceBytes];
  uint64_t full[kStages];
};

struct Piece {
  const char* from;
  char* to;
  uint32_t bytes;
};

__global__ void load_pieces(const __grid_constant__ FetchBlocksArguments a, const FaultSink faults) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int count = checked_loads(a, faults);
  const int of_block = static_cast<int>((a.block_bytes + kPieceBytes - 1) / kPieceBytes);
  const int64_t pieces = int64_t{2} * count * of_block;
  const int64_t first = blockIdx.x, step = gridDim.x;
  const int64_t own = pieces > first ? (pieces - first + step - 1) / step : 0;
  for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(&shared.full[stage], 1);
  ptx::fence_mbarrier_init();

  // A piece of blocks that there are not has no bytes.
  const auto piece = [&](int64_t nth) {
    const int64_t index = first + nth * step;
    const auto load = static_cast<int32_t>(index / (2 * of_block));
    const int half = static_cast<int>(index / of_block % 2);
    const int64_t offset = index % of_block * kPieceBytes;
    if (!a.names_blocks(load)) {
      report_fault(faults, FetchBlocksFault::block_out_of_range, load);
      return Piece{nullptr, nullptr, 0};
    }
    const char* from = static_cast<const char*>(half == 0 ? a.host_keys : a.host_values) + a.loads[load] * a.block_bytes;
    char* to = static_cast<char*>(half == 0 ? a.keys : a.values) + a.loads[a.most_loads + load] * a.block_bytes;
    const int64_t left = a.block_bytes - offset;
    return Piece{from + offset, to + offset, static_cast<uint32_t>(left < kPieceBytes ? left : kPieceBytes)};
  };
  const auto request = [&](int64_t nth) {
    if (nth >= own) return;
    const Piece next = piece(nth);
    const int stage = static_cast<int>(nth % kStages);
    ptx::mbarrier_arrive_expect_bytes(&shared.full[stage], next.bytes);
    if (next.bytes > 0) ptx::bulk_copy(shared.pieces[stage], next.from, next.bytes, &shared.full[stage]);
  };
  for (int64_t nth = 0; nth < kLoading; ++nth) request(nth);
  for (int64_t nth = 0; nth < own; ++nth) {
    const int stage = static_cast<int>(nth % kStages);
    ptx::mbarrier_wait(&shared.full[stage], static_cast<uint32_t>(nth / kStages % 2));
    const Piece arrived = piece(nth);
    if (arrived.bytes > 0) ptx::bulk_store(arrived.to, shared.pieces[stage], arrived.bytes);
    ptx::bulk_store_commit();
    ptx::bulk_store_wait_read<kStoring - 1>();  // the stage of the next request is free
    request(nth + kLoading);
  }
  ptx::bulk_store_wait<0>();
}

}  // namespace

Status fetch_blocks_bulk(const FetchBlocksArguments& a, FaultSink faults, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(load_pieces, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (error != cudaSuccess) return cuda_status(error);
  load_pieces<<<kThreadBlocks, 1, sizeof(SharedStorage), stream>>>(a, faults);
  return launch_status();
}

}  // namespace kv::cuda
