// The gate of a SwiGLU feed-forward layer (Shazeer 2020, eq. 6), between its projections:
//   output[t, i] = silu(gate[t, i]) * up[t, i],  silu(x) = x / (1 + e^-x)
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct SwigluArguments {
  // [token, feature]; strides count elements, features are contiguous.
  const void* gate = nullptr;
  int64_t gate_stride = 0;
  const void* up = nullptr;
  int64_t up_stride = 0;
  void* output = nullptr;  // may be gate or up
  int64_t output_stride = 0;
  DType dtype = DType::f32;  // of all three
  int64_t tokens = 0;
  int64_t features = 0;
};

Status swiglu(const SwigluArguments& arguments, ExecutionContext& context);

}  // namespace kv
