#include "shared/coded-keys/coded-keys.h"

#include <string>

namespace kv {
namespace {

std::string range(const char* what, int most, int given) {
  return std::string(what) + " are 1 to " + std::to_string(most) + ", not " + std::to_string(given);
}

}  // namespace

Status validate_coded_keys(const CodedKeys& k) {
  const auto no_kernel = [](std::string why) { return Status::failure(StatusCode::capability, std::move(why)); };
  if (k.head_dim < 1 || k.head_dim > kMostCodedDims) return no_kernel(range("the dims of a coded key", kMostCodedDims, k.head_dim));
  if (k.code_bits < 1 || k.code_bits > kMostCodeBits) return no_kernel(range("the bits of a code", kMostCodeBits, k.code_bits));
  if (k.centroid_count < 1 || k.centroid_count > kMostCentroids) {
    return no_kernel(range("the centroids of a book", kMostCentroids, k.centroid_count));
  }
  if (k.sub_dim < 1 || k.head_dim % k.sub_dim != 0 || (k.books != 1 && k.books != k.groups())) {
    return Status::failure(StatusCode::invalid_value,
                           "heads of " + std::to_string(k.head_dim) + " dims have no sub-vectors of " +
                               std::to_string(k.sub_dim) + " dims with " + std::to_string(k.books) +
                               " books: give sub-vectors that divide the head, and one book or one for each of them");
  }
  if (k.centroid_count > 1 << k.code_bits) {
    return Status::failure(StatusCode::invalid_value, std::to_string(k.code_bits) + " bits do not tell " +
                                                          std::to_string(k.centroid_count) + " centroids apart");
  }
  if (reinterpret_cast<uintptr_t>(k.codes) % 16 != 0) {
    return Status::failure(StatusCode::invalid_value, "coded blocks must begin at a multiple of 16 bytes: give a tensor of its own");
  }
  return Status::success();
}

}  // namespace kv
