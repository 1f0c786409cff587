// Writes coded blocks of keys as dense ones, the reverse of encode-keys:
//   keys[to[i]] = channel_scale * centroid_code   for every code of codes[from[i]],
// the product in f32, rounded once to the dtype of the dense blocks.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/coded-keys/coded-keys.h"

namespace kv {

using DecodeKeysArguments = CodedKeyCopies;

// Refuses sizes that contradict each other (invalid_value, capability).
Status decode_keys(const DecodeKeysArguments& arguments, ExecutionContext& context);

}  // namespace kv
