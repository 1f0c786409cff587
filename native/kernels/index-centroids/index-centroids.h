// Builds the search structure of each codebook, which encode-keys finds the nearest centroids with
// (shared/coded-keys/centroid-index.h). It runs on the host on every device, once for each codebook.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

// Both in memory that the host reads and writes, contiguous.
struct IndexCentroidsArguments {
  const uint16_t* centroids = nullptr;  // f16 [book, centroid, sub_dim]
  uint8_t* index = nullptr;             // [book, IndexShape(centroid_count, sub_dim).bytes()]
  int64_t books = 0;
  int32_t centroid_count = 0;
  int32_t sub_dim = 0;
};

// Refuses more than 8192 centroids (capability), and centroids that are not finite (invalid_value, when it runs).
Status index_centroids(const IndexCentroidsArguments& arguments, ExecutionContext& context);

}  // namespace kv
