// Makes the index of a book, by which the nearest centroid is found (centroid-index.h).
#pragma once

#include <cstdint>

#include "shared/coded-keys/centroid-lists.h"

namespace kv {

class Workers;

// Fills in the indices of books, f16 [book, centroid, sub_dim], all finite. May throw std::bad_alloc.
void build_centroid_indices(const uint16_t* books, int64_t count, int centroids, int sub_dim, uint8_t* indices,
                            const ListLoops& loops, Workers& workers);

}  // namespace kv
