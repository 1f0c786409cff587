// cuBLASLt is found at run time. A machine without cuBLASLt still works, on kernels of our own.
//
// The few declarations that we use are written out here, because NVIDIA's header belongs to a package that the build
// does not need. The numbers are cuBLASLt's ABI, which is the same in versions 12 and 13.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kv {

using CublasLtHandle = void*;
using CublasLtDescriptor = void*;

struct CublasLtAlgorithm {
  uint64_t data[8];
};

struct CublasLtHeuristic {
  CublasLtAlgorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

constexpr int kCublasCompute32F = 68;
constexpr int kCublasTranspose = 1;
constexpr int kCublasEpilogueBias = 4;
enum CublasLtMatmulAttribute { kMatmulTransposeA = 3, kMatmulEpilogue = 7, kMatmulBias = 8 };
enum CublasLtPreferenceAttribute { kPreferenceWorkspaceBytes = 1 };

// The library's functions. Once the library is loaded, no member is null.
struct CublasLt {
  int (*create)(CublasLtHandle*);
  int (*matmul)(CublasLtHandle, CublasLtDescriptor, const void* alpha, const void* a, CublasLtDescriptor a_layout,
                const void* b, CublasLtDescriptor b_layout, const void* beta, const void* c,
                CublasLtDescriptor c_layout, void* d, CublasLtDescriptor d_layout, const CublasLtAlgorithm*,
                void* workspace, size_t workspace_bytes, cudaStream_t);
  int (*matmul_create)(CublasLtDescriptor*, int compute_type, cudaDataType_t scale_type);
  int (*matmul_set)(CublasLtDescriptor, int attribute, const void* value, size_t bytes);
  int (*matmul_destroy)(CublasLtDescriptor);
  int (*layout_create)(CublasLtDescriptor*, cudaDataType_t, uint64_t rows, uint64_t columns, int64_t leading_dimension);
  int (*layout_destroy)(CublasLtDescriptor);
  int (*preference_create)(CublasLtDescriptor*);
  int (*preference_set)(CublasLtDescriptor, int attribute, const void* value, size_t bytes);
  int (*preference_destroy)(CublasLtDescriptor);
  int (*heuristic)(CublasLtHandle, CublasLtDescriptor, CublasLtDescriptor a, CublasLtDescriptor b, CublasLtDescriptor c,
                   CublasLtDescriptor d, CublasLtDescriptor preference, int wanted, CublasLtHeuristic*, int* found);
};

// Null when the library is not installed. `reason`, if given, then says where it was looked for.
const CublasLt* cublas_lt(std::string* reason = nullptr);

}  // namespace kv
