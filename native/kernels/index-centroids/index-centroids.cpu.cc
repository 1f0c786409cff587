#include "kernels/index-centroids/index-centroids.h"

#include "runtime/workers.h"
#include "shared/coded-keys/centroid-index.h"

namespace kv {
namespace KV_ISA {

void index_centroids(const IndexCentroidsArguments& a, Workers& workers) {
  const int64_t bytes = IndexShape(a.centroid_count, a.sub_dim).bytes();
  workers.for_each(static_cast<size_t>(a.books), [&](size_t book, int) {
    build_centroid_index(a.centroids + static_cast<int64_t>(book) * a.centroid_count * a.sub_dim, a.centroid_count, a.sub_dim,
                         a.index + static_cast<int64_t>(book) * bytes);
  });
}

}  // namespace KV_ISA
}  // namespace kv
