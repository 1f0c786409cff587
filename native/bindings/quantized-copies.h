// Reads what operations share that copy between dense and quantized blocks.
#pragma once

#include "bindings/operation-call.h"

namespace kv {

// `keys` is [block, blockToken, dim]. Four consecutive arguments from 5 on: keyBits, valueBits, rotated,
// copies [from | to, copy].
template <class Keys, class Arguments>
void describe_quantized_copies(OperationCall& call, const Keys& keys, Arguments& to) {
  to.keys = keys.data;
  to.dtype = keys.dtype();
  to.block_stride = keys.stride(0);
  to.token_stride = keys.stride(1);
  to.head_dim = static_cast<int32_t>(keys.extent(2));
  to.key_bits = static_cast<int32_t>(call.integer(5));
  to.value_bits = static_cast<int32_t>(call.integer(6));
  to.rotated = call.flag(7);
  const TensorArgument copies = call.tensor(8);
  to.from = copies.as<int32_t>();
  to.to = to.from + copies.stride(0);
  to.copies = static_cast<int32_t>(copies.extent(1));
}

}  // namespace kv
