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

// A tensor of 16-bit elements with three axes, innermost first. The innermost axis is contiguous.
struct TensorBox {
  DType dtype = DType::f16;
  const void* data = nullptr;  // 16-byte aligned
  std::array<int64_t, 3> extents = {};
  std::array<int64_t, 2> strides = {};  // in elements, of axes 1 and 2; multiples of 8
  std::array<int32_t, 3> box = {};      // elements of one copy; box[0] covers 128 bytes, one row of the swizzle
};

// Fills `map` for copies with the 128-byte swizzle that wgmma reads. The driver's function is looked up at run time,
// so that the addon loads on machines without a driver.
inline Status encode_tensor_map(const TensorBox& tensor, CUtensorMap* map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t lookup =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (lookup != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    return Status::failure(StatusCode::capability,
                           "the CUDA driver has no tensor maps: install version 525 or later");
  }
  const cuuint64_t extents[3] = {cuuint64_t(tensor.extents[0]), cuuint64_t(tensor.extents[1]),
                                 cuuint64_t(tensor.extents[2])};
  const cuuint64_t strides_in_bytes[2] = {cuuint64_t(tensor.strides[0]) * 2,
                                          cuuint64_t(tensor.strides[1]) * 2};
  const cuuint32_t box[3] = {cuuint32_t(tensor.box[0]), cuuint32_t(tensor.box[1]), cuuint32_t(tensor.box[2])};
  const cuuint32_t every_element[3] = {1, 1, 1};
  const CUresult result = reinterpret_cast<Encode>(entry)(
      map, tensor.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
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
