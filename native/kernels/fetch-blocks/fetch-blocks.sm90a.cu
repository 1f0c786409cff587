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

// Two fill the link, and take least of the bandwidth of what runs beside them; of small blocks each thread block has more to do.
constexpr unsigned kThreadBlocks = 2, kThreadBlocksOfSmall = 4;
constexpr int kPieceBytes = 8 * 1024;
// More under way would be no faster alone, and would take more of the bandwidth of what runs beside it.
constexpr int kStages = 6;
constexpr int kLoading = kStages - 1;  // one is on its way out of shared memory

// Loads of a thread block that its warp reads at once.
constexpr int kBatch = 32;

struct SharedStorage {
  alignas(128) unsigned char pieces[kStages][2][kPieceBytes];  // of keys and of values
  uint64_t full[kStages];
  int2 loads[2 * kBatch];  // from and to, of this batch and of the next
};

// A stage holds a piece of a load's keys and the same of its values. Which piece comes next, without divisions: one thread does
// all, and what it does for a piece has to take less than the link does.
struct Piece {
  int load = 0;  // of the thread block
  int64_t offset = 0;
  int stage = 0;
  uint32_t phase = 0;

  __device__ uint32_t bytes(int64_t block_bytes) const {
    return static_cast<uint32_t>(block_bytes - offset < kPieceBytes ? block_bytes - offset : kPieceBytes);
  }
  __device__ void advance(int64_t block_bytes) {
    offset += kPieceBytes;
    if (offset >= block_bytes) {
      offset = 0;
      ++load;
    }
    if (++stage < kStages) return;
    stage = 0;
    phase ^= 1;
  }
};

__global__ void load_pieces(const __grid_constant__ FetchBlocksArguments a, const FaultSink faults) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(&shared.full[stage], 1);
    ptx::fence_mbarrier_init();
  }
  ptx::wait_for_previous_kernel();
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const int count = checked_loads(a, faults);
  const int own = count > first ? (count - first + step - 1) / step : 0;
  // A load that leads outside is left out.
  const auto numbers_of = [&](int batch) {
    const int nth = batch * kBatch + lane, load = first + nth * step;
    if (nth >= own) return make_int2(-1, -1);
    if (a.names_blocks(load)) return make_int2(a.loads[load], a.loads[a.most_loads + load]);
    report_fault(faults, FetchBlocksFault::block_out_of_range, load);
    return make_int2(-1, -1);
  };
  Piece requested, stored;
  const auto request = [&] {
    if (requested.load >= own) return;
    const int2 numbers = shared.loads[requested.load % (2 * kBatch)];
    const uint32_t bytes = requested.bytes(a.block_bytes);
    uint64_t* full = &shared.full[requested.stage];
    ptx::mbarrier_arrive_expect_bytes(full, numbers.x < 0 ? 0 : 2 * bytes);
    if (numbers.x >= 0) {
      const int64_t from = numbers.x * a.block_bytes + requested.offset;
      ptx::bulk_copy(shared.pieces[requested.stage][0], static_cast<const char*>(a.host_keys) + from, bytes, full);
      ptx::bulk_copy(shared.pieces[requested.stage][1], static_cast<const char*>(a.host_values) + from, bytes, full);
    }
    requested.advance(a.block_bytes);
  };
  const auto store = [&] {
    ptx::mbarrier_wait(&shared.full[stored.stage], stored.phase);
    const int2 numbers = shared.loads[stored.load % (2 * kBatch)];
    if (numbers.x >= 0) {
      const int64_t to = numbers.y * a.block_bytes + stored.offset;
      const uint32_t bytes = stored.bytes(a.block_bytes);
      ptx::bulk_store(static_cast<char*>(a.keys) + to, shared.pieces[stored.stage][0], bytes);
      ptx::bulk_store(static_cast<char*>(a.values) + to, shared.pieces[stored.stage][1], bytes);
    }
    ptx::bulk_store_commit();
    stored.advance(a.block_bytes);
  };
  shared.loads[lane] = numbers_of(0);
  shared.loads[kBatch + lane] = numbers_of(1);
  __syncwarp();
  for (int i = 0; lane == 0 && i < kLoading; ++i) request();
  int2 next = numbers_of(2);
  for (int batch = 0; batch * kBatch < own; ++batch) {
    while (lane == 0 && stored.load < min(own, (batch + 1) * kBatch)) {
      store();
      ptx::bulk_store_wait_read<1>();  // the stage of the store before is free
      request();
    }
    // The batch is done, and requests are in the next one.
    __syncwarp();
    shared.loads[batch % 2 * kBatch + lane] = next;
    next = numbers_of(batch + 3);
    __syncwarp();
  }
  // Not before: thread blocks of the next kernel that wait would take room from what runs beside the loads.
  ptx::let_next_kernel_start();
  if (lane == 0) ptx::bulk_store_wait<0>();
}

}  // namespace

Status fetch_blocks_bulk(const FetchBlocksArguments& a, FaultSink faults, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(load_pieces, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (error != cudaSuccess) return cuda_status(error);
  const dim3 blocks(a.block_bytes < kPieceBytes ? kThreadBlocksOfSmall : kThreadBlocks);
  return launch_overlapped(load_pieces, blocks, dim3(kBatch), sizeof(SharedStorage), stream, a, faults);
}

}  // namespace kv::cuda
