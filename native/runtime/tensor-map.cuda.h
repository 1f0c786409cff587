// Makes tensor maps on the host: descriptions of tensors for TMA (sm_90).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <string>

#include "runtime/dtype.h"
#include "runtime/status.h"

namespace kv {

// A tensor of 16-bit elements, its axes innermost first. The innermost axis is contiguous.
template <size_t kAxes>
struct TensorBoxOf {
  DType dtype = DType::f16;
  const void* data = nullptr;  // 16-byte aligned
  std::array<int64_t, kAxes> extents = {};
  std::array<int64_t, kAxes - 1> strides = {};  // in elements, of the axes from 1 on; multiples of 8
  std::array<int32_t, kAxes> box = {};  // elements of one copy; box[0] covers 128 bytes, one row of the swizzle
};

using TensorBox = TensorBoxOf<3>;

// Fills `map` for copies with the 128-byte swizzle that wgmma reads. The driver's function is looked up at run time,
// so that the addon loads on machines without a driver.
template <size_t kAxes>
Status encode_tensor_map(const TensorBoxOf<kAxes>& tensor, CUtensorMap* map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t lookup =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (lookup != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    return Status::failure(StatusCode::capability,
                           "the CUDA driver has no tensor maps: install version 525 or later");
  }
  cuuint64_t extents[kAxes];
  cuuint64_t strides_in_bytes[kAxes];
  cuuint32_t box[kAxes];
  cuuint32_t every_element[kAxes];
  for (size_t axis = 0; axis < kAxes; ++axis) {
    extents[axis] = cuuint64_t(tensor.extents[axis]);
    strides_in_bytes[axis] = axis + 1 < kAxes ? cuuint64_t(tensor.strides[axis]) * 2 : 0;
    box[axis] = cuuint32_t(tensor.box[axis]);
    every_element[axis] = 1;
  }
  const CUresult result = reinterpret_cast<Encode>(entry)(
      map, tensor.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kAxes,
      const_cast<void*>(tensor.data), extents, strides_in_bytes, box, every_element,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::failure(StatusCode::invalid_value,
                           "the driver refused a tensor map (code " +
                               std::to_string(static_cast<int>(result)) +
                               "): rows must be 16-byte aligned and strides multiples of 8 elements");
  }
  return Status::success();
}

}  // namespace kv
