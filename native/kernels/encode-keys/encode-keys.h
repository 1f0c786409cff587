// Writes full dense blocks of keys in codes (HCAttention, section 3.1):
//   codes[to[i]] = argmin_c |keys[from[i]] / channel_scale - centroid_c|   for every i, in each sub-vector.
// The nearest centroid is exact, and the first of equally near ones (shared/coded-keys/centroid-index.h). A sub-vector
// that no centroid is near to, because of a NaN or an infinity, gets code 0, and its token is marked as spoilt.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/coded-keys/coded-keys.h"

namespace kv {

struct EncodeKeysArguments : CodedKeyCopies {
  // The books' indices, [kv_head, book, byte], as index_centroids writes them, aligned to 16 bytes.
  const uint8_t* index = nullptr;
};

// Refuses sizes that contradict each other (invalid_value, capability).
Status encode_keys(const EncodeKeysArguments& arguments, ExecutionContext& context);

}  // namespace kv
