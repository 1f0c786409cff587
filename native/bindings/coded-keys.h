// Reads the tensors that say what coded blocks stand for.
#pragma once

#include "bindings/operation-call.h"
#include "shared/coded-keys/coded-keys.h"

namespace kv {

// Four consecutive arguments from `first` on: codedKeys [codedBlock, byte], centroids [kvHead, book, centroid, subDim],
// channelScale [kvHead, dim] or undefined, codeBits.
inline void describe_coded_keys(OperationCall& call, size_t first, int64_t head_dim, CodedKeys& keys) {
  const TensorArgument codes = call.tensor(first);
  const TensorArgument centroids = call.tensor(first + 1);
  keys.codes = static_cast<uint32_t*>(const_cast<void*>(codes.data));
  keys.block_count = static_cast<int32_t>(codes.extent(0));
  keys.code_bits = static_cast<int32_t>(call.integer(first + 3));
  keys.centroids = centroids.as<uint16_t>();
  keys.kv_heads = static_cast<int32_t>(centroids.extent(0));
  keys.books = static_cast<int32_t>(centroids.extent(1));
  keys.centroid_count = static_cast<int32_t>(centroids.extent(2));
  keys.sub_dim = static_cast<int32_t>(centroids.extent(3));
  keys.channel_scale = call.optional_tensor(first + 2).as<float>();
  keys.head_dim = static_cast<int32_t>(head_dim);
}

// Six consecutive arguments from `first` on: keys [block, blockToken, dim], the four of describe_coded_keys, and copies
// [from | to | kvHead, copy].
inline void describe_copies(OperationCall& call, size_t first, CodedKeyCopies& to) {
  const TensorArgument keys = call.tensor(first);
  const TensorArgument copies = call.tensor(first + 5);
  describe_coded_keys(call, first + 1, keys.extent(2), to);
  to.keys = const_cast<void*>(keys.data);
  to.dtype = keys.dtype();
  to.block_stride = keys.stride(0);
  to.token_stride = keys.stride(1);
  to.from = copies.as<int32_t>();
  to.to = to.from + copies.stride(0);
  to.heads = to.to + copies.stride(0);
  to.copies = static_cast<int32_t>(copies.extent(1));
}

}  // namespace kv
