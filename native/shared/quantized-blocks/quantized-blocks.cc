#include "shared/quantized-blocks/quantized-blocks.h"

#include <string>

namespace kv {

Status validate_quantized_format(int32_t head_dim, int32_t bits) {
  if (bits != 8 && bits != 4 && bits != 3 && bits != 2) {
    return Status::failure(StatusCode::capability, "codes have 8, 4, 3 or 2 bits, not " + std::to_string(bits));
  }
  if (head_dim < 1 || head_dim > kMostQuantizedDims) {
    return Status::failure(StatusCode::capability, "quantized blocks have 1 to " + std::to_string(kMostQuantizedDims) +
                                                       " dims, not " + std::to_string(head_dim));
  }
  return Status::success();
}

}  // namespace kv
