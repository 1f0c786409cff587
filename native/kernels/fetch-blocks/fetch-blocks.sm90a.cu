// Loads by TMA, straight from host memory: one warp of each of few thread blocks keeps a ring of pieces under way, to shared
// memory and on to the device's. It takes nothing of the multiprocessors' arithmetic from what runs beside it.
#include "kernels/fetch-blocks/fetch-blocks.cuda.h"
#include "ptx/bulk-copy.cuda.h"
#include "ptx/dependent-launch.cuda.h"
#include "ptx/mbarrier.cuda.h"
#include "runtime/check.cuda.h"
#include "runtime/fault.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv::cuda {
namespace {

constexpr unsigned kThreadBlocks = 4;
constexpr int kPieceBytes = 8 * 1024;
// More under way would be no faster alone, and would take more of the bandwidth of what runs beside it.
constexpr int kStages = 6;
constexpr int kStoring = 1;  // stages that may be on their way out of shared memory
constexpr int kLoading = kStages - kStoring;

// Loads of a thread block that its warp reads at once.
constexpr int kBatch = 32;

struct SharedStorage {
  alignas(128) unsigned char pieces[kStages][2][kPieceBytes];  // of keys and of values
  uint64_t full[kStages];
  int2 loads[2][kBatch];  // from and to, of this batch and of the next
};

// The loads of a thread block, and the pieces of each. A stage holds one of its keys and the same of its values.
struct Pieces {
  const FetchBlocksArguments& a;
  const SharedStorage& shared;
  const int of_load = static_cast<int>((a.block_bytes + kPieceBytes - 1) / kPieceBytes);

  // Calls use(from, to, bytes, half) for keys and for values, unless the list leads outside.
  template <class Use>
  __device__ void with(int nth, Use use) const {
    const int load = nth / of_load, part = nth % of_load;
    const int2 numbers = shared.loads[load / kBatch % 2][load % kBatch];
    if (numbers.x < 0) return;
    const int64_t offset = int64_t{part} * kPieceBytes;
    const int64_t left = a.block_bytes - offset;
    const auto bytes = static_cast<uint32_t>(left < kPieceBytes ? left : kPieceBytes);
    const int64_t from = numbers.x * a.block_bytes + offset, to = numbers.y * a.block_bytes + offset;
    use(static_cast<const char*>(a.host_keys) + from, static_cast<char*>(a.keys) + to, bytes, 0);
    use(static_cast<const char*>(a.host_values) + from, static_cast<char*>(a.values) + to, bytes, 1);
  }
};

__global__ void load_pieces(const __grid_constant__ FetchBlocksArguments a, const FaultSink faults) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  ptx::wait_for_previous_kernel();
  const int count = checked_loads(a, faults);
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const int own = count > first ? (count - first + step - 1) / step : 0;
  const Pieces pieces{a, shared};
  const int all = own * pieces.of_load, of_batch = kBatch * pieces.of_load;
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
    pieces.with(nth, [&](const char*, char*, uint32_t bytes, int) { announced += bytes; });
    ptx::mbarrier_arrive_expect_bytes(&shared.full[stage], announced);
    pieces.with(nth, [&](const char* from, char*, uint32_t bytes, int half) {
      ptx::bulk_copy(shared.pieces[stage][half], from, bytes, &shared.full[stage]);
    });
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
      pieces.with(nth, [&](const char*, char* to, uint32_t bytes, int half) { ptx::bulk_store(to, shared.pieces[stage][half], bytes); });
      ptx::bulk_store_commit();
      ptx::bulk_store_wait_read<kStoring - 1>();  // the stage of the next request is free
    }
    request(nth + kLoading);
  }
  // Not before: thread blocks of the next kernel that wait would take room from what runs beside the loads.
  ptx::let_next_kernel_start();
  if (lane == 0) ptx::bulk_store_wait<0>();
}

}  // namespace

Status fetch_blocks_bulk(const FetchBlocksArguments& a, FaultSink faults, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(load_pieces, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (error != cudaSuccess) return cuda_status(error);
  return launch_overlapped(load_pieces, dim3(kThreadBlocks), dim3(kBatch), sizeof(SharedStorage), stream, a, faults);
}

}  // namespace kv::cuda
