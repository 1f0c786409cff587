// Ways to save the blocks of a prompt in places of host memory, which torch-block-saves.py times.
#include <array>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/cuda/kernels/for-python.cuda.h"

namespace {

constexpr int kSaveThreads = 1024;
constexpr int kSavePieces = 16;

struct Saves {
  const char* device;   // blocks one behind the other
  char* host;           // where block b goes is at places[b]
  int64_t block_bytes;  // a multiple of 16
  int blocks;           // a multiple of kSavePieces
};

// Block after block, by as many thread blocks as there are.
__global__ void __launch_bounds__(kSaveThreads) store_each(const Saves a, const int32_t* places) {
  for (int b = static_cast<int>(blockIdx.x); b < a.blocks; b += static_cast<int>(gridDim.x)) {
    const auto* from = reinterpret_cast<const uint4*>(a.device + b * a.block_bytes);
    auto* to = reinterpret_cast<uint4*>(a.host + places[b] * a.block_bytes);
    for (int64_t i = threadIdx.x; i * 16 < a.block_bytes; i += kSaveThreads) to[i] = from[i];
  }
}

// `run` neighbours each, whose places are neighbours too.
cudaError_t copy_runs(const Saves& a, const int32_t* places, int run, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (int b = 0; b < a.blocks; b += run) {
    const cudaError_t own =
        cudaMemcpyAsync(a.host + places[b] * a.block_bytes, a.device + b * a.block_bytes, static_cast<size_t>(run * a.block_bytes), cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = own;
  }
  return error;
}

const std::array<cudaEvent_t, kSavePieces>& arrivals() {
  static const std::array<cudaEvent_t, kSavePieces> all = [] {
    std::array<cudaEvent_t, kSavePieces> made{};
    for (cudaEvent_t& each : made) cudaEventCreateWithFlags(&each, cudaEventDisableTiming);
    return made;
  }();
  return all;
}

// One copy in pieces to `staging`; threads put the blocks of each piece in their places while the next one comes.
cudaError_t copy_and_scatter(const Saves& a, const int32_t* places, char* staging, int threads, cudaStream_t stream) {
  const int of_piece = a.blocks / kSavePieces;
  const int64_t bytes = of_piece * a.block_bytes;
  for (int piece = 0; piece < kSavePieces; ++piece) {
    cudaMemcpyAsync(staging + piece * bytes, a.device + piece * bytes, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream);
    cudaEventRecord(arrivals()[static_cast<size_t>(piece)], stream);
  }
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      for (int piece = 0; piece < kSavePieces; ++piece) {
        cudaEventSynchronize(arrivals()[static_cast<size_t>(piece)]);
        for (int b = piece * of_piece + thread; b < (piece + 1) * of_piece; b += threads) {
          std::memcpy(a.host + places[b] * a.block_bytes, staging + b * a.block_bytes, static_cast<size_t>(a.block_bytes));
        }
      }
    });
  }
  for (std::thread& each : all) each.join();
  return cudaGetLastError();
}

}  // namespace

// sizes: bytes of a block, blocks, way (0 copies of runs, 1 a store kernel, 2 a copy and a scatter by the CPU, which is done when
// this returns), blocks of a run or thread blocks or threads. pointers: blocks, host memory, staging in host memory, places in host
// memory, the same in device memory.
KV_FOR_PYTHON int kv_save_blocks(const int64_t* sizes, void* const* pointers, void* stream) {
  const Saves a{static_cast<const char*>(pointers[0]), static_cast<char*>(pointers[1]), sizes[0], static_cast<int>(sizes[1])};
  const auto* places = static_cast<const int32_t*>(pointers[3]);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int count = static_cast<int>(sizes[3]);
  if (sizes[2] == 0) return copy_runs(a, places, count, cuda_stream);
  if (sizes[2] == 2) return copy_and_scatter(a, places, static_cast<char*>(pointers[2]), count, cuda_stream);
  store_each<<<static_cast<unsigned>(count), kSaveThreads, 0, cuda_stream>>>(a, static_cast<const int32_t*>(pointers[4]));
  return cudaGetLastError();
}
