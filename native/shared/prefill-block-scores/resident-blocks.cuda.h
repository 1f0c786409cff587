// The grid of kernels whose thread blocks take one item of work after another, and have working memory of their own.
#pragma once

#include <algorithm>
#include <string>

#include "runtime/check.cuda.h"
#include "shared/prefill-block-scores/tile-products.cuda.h"

namespace kv {
namespace prefill_block_scores {

// Allows a kernel so many bytes of dynamic shared memory (capability).
template <class Kernel>
Status allow_shared_bytes(Kernel* kernel, int bytes) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) return Status::success();
  cudaGetLastError();
  return Status::failure(StatusCode::capability, "the device has no " + std::to_string(bytes) +
                                                     " bytes of shared memory for a thread block; heads of fewer dims need less");
}

struct ResidentBlocks {
  int count = 0;  // that the device holds at a time
  int shared_bytes = 0;

  // For a kernel whose dynamic shared memory is the slices; fills what `slices` has besides its count.
  template <class Slices, class Kernel>
  Status find(Kernel* kernel, SliceRoom& slices) {
    int device = 0;
    int multiprocessors = 0;
    int room = 0;
    cudaFuncAttributes attributes{};
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return cuda_status(error);
    // Slices are aligned to as much.
    constexpr int kAligned = 1024;
    room -= (static_cast<int>(attributes.sharedSizeBytes) + kAligned - 1) / kAligned * kAligned;
    slices = {slices.count, true, Slices::kMostStages};
    if (Slices::bytes(slices) > room) slices.rows_stay = false;
    if (Slices::bytes(slices) > room) slices.stages = 2;
    shared_bytes = Slices::bytes(slices);
    const Status status = allow_shared_bytes(kernel, shared_bytes);
    if (!status.ok()) return status;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, Slices::kThreads, static_cast<size_t>(shared_bytes));
    count *= multiprocessors;
    return cuda_status(error);
  }

  // How many to launch for `items` items, so that their working memory stays below a gibibyte.
  int of(int items, size_t bytes_of_one) const {
    const auto affordable = static_cast<int>(std::max<size_t>(1, (size_t{1} << 30) / bytes_of_one));
    return std::min({items, count, affordable});
  }
};

}  // namespace prefill_block_scores
}  // namespace kv
