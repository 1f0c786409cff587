// Loads by TMA, straight from host memory: one warp of each of few thread blocks keeps a ring of pieces under way, to shared
// memory and on to the device's. It takes nothing of the multiprocessors' arithmetic from what runs beside it.
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

// Loads of a thread block that its warp reads at once.
constexpr int kBatch = 32;

struct SharedStorage {
  alignas(128) unsigned char pieces[kStages][kPieceBytes];
  uint64_t full[kStages];
  int2 loads[2][kBatch];  // from and to, of this batch and of the next
};

// The loads of a thread block, and the pieces of each: those of its keys, and then those of its values.
struct Pieces {
  const FetchBlocksArguments& a;
  const SharedStorage& shared;
  const int of_half = static_cast<int>((a.block_bytes + kPieceBytes - 1) / kPieceBytes);

  // Calls use(from, to, bytes), unless the list leads outside.
  template <class Use>
  __device__ void with(int nth, Use use) const {
    const int load = nth / (2 * of_half), part = nth % (2 * of_half);
    const int2 numbers = shared.loads[load / kBatch % 2][load % kBatch];
    if (numbers.x < 0) return;
    const bool is_key = part < of_half;
    const int64_t offset = int64_t{is_key ? part : part - of_half} * kPieceBytes;
    const int64_t left = a.block_bytes - offset;
    use(static_cast<const char*>(is_key ? a.host_keys : a.host_values) + numbers.x * a.block_bytes + offset,
        static_cast<char*>(is_key ? a.keys : a.values) + numbers.y * a.block_bytes + offset,
        static_cast<uint32_t>(left < kPieceBytes ? left : kPieceBytes));
  }
};

__global__ void load_pieces(const __grid_constant__ FetchBlocksArguments a, const FaultSink faults) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  const int count = checked_loads(a, faults);
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const int own = count > first ? (count - first + step - 1) / step : 0;
  const Pieces pieces{a, shared};
  const int all = own * 2 * pieces.of_half, of_batch = kBatch * 2 * pieces.of_half;
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(&shared.full[stage], 1);
    ptx::fence_mbarrier_init();
  }
  const auto numbers_of = [&](int batch) {
    const int nth = batch * kBatch + lane, load = first + nth * step;
    if (nth >= own) return make_int2(-1, -1);
    if (a.names_blocks(load)) return make_int2(a.loads[load], a.loads[a.most_loads + load]);
    report_fault(faults, FetchBlocksFault::block_out_of_range, load);
    return make_int2(-1, -1);
  };
  const auto request = [&](int nth) {
    if (nth >= all || lane != 0) return;
    const int stage = nth % kStages;
    uint32_t announced = 0;
    pieces.with(nth, [&](const char*, char*, uint32_t bytes) { announced = bytes; });
    ptx::mbarrier_arrive_expect_bytes(&shared.full[stage], announced);
    pieces.with(nth, [&](const char* from, char*, uint32_t bytes) { ptx::bulk_copy(shared.pieces[stage], from, bytes, &shared.full[stage]); });
  };
  shared.loads[0][lane] = numbers_of(0);
  shared.loads[1][lane] = numbers_of(1);
  int2 next = numbers_of(2);
  __syncwarp();
  for (int nth = 0; nth < kLoading; ++nth) request(nth);
  for (int nth = 0; nth < all; ++nth) {
    if (nth > 0 && nth % of_batch == 0) {
      // The batch before is done, and requests are not yet at the next one.
      const int batch = nth / of_batch;
      __syncwarp();
      shared.loads[(batch + 1) % 2][lane] = next;
      next = numbers_of(batch + 2);
      __syncwarp();
    }
    if (lane == 0) {
      const int stage = nth % kStages;
      ptx::mbarrier_wait(&shared.full[stage], static_cast<uint32_t>(nth / kStages % 2));
      pieces.with(nth, [&](const char*, char* to, uint32_t bytes) { ptx::bulk_store(to, shared.pieces[stage], bytes); });
      ptx::bulk_store_commit();
      ptx::bulk_store_wait_read<kStoring - 1>();  // the stage of the next request is free
    }
    request(nth + kLoading);
  }
  if (lane == 0) ptx::bulk_store_wait<0>();
}

}  // namespace

Status fetch_blocks_bulk(const FetchBlocksArguments& a, FaultSink faults, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(load_pieces, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (error != cudaSuccess) return cuda_status(error);
  load_pieces<<<kThreadBlocks, kBatch, sizeof(SharedStorage), stream>>>(a, faults);
  return launch_status();
}

}  // namespace kv::cuda
