// Mini-batch k-means (Sculley 2010; Sec. 3.1 of HCAttention) over the sub-vectors of keys, one step of training at a
// time. Each kv head has `books` codebooks: one that all groups of its dims share, or one for each group. For every
// book and iteration, with n_c the vectors that centroid c has had so far:
//   X = a batch of sub-vectors, drawn at random;  X_c = those of X whose nearest centroid is mean_c
//   mean_c = (n_c mean_c + sum of X_c) / (n_c + |X_c|);  n_c += |X_c|
// Sub-vectors are those of key / scale. The first iteration begins with k-means++ on a sample of the vectors (Arthur
// and Vassilvitskii 2007). Centroids that had no vector yet are moved to those of a batch that lie farthest from
// their centroids.
//
// The same keys and seed give the same bits, whatever the number of threads.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct TrainCodebookArguments {
  // [kv_head, token, dim]. Strides count elements, dims are contiguous.
  const void* keys = nullptr;
  DType dtype = DType::f32;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t tokens = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t groups = 0;  // sub-vectors of a key
  int32_t books = 0;   // of a kv head: 1 or `groups`
  int32_t centroids = 0;
  float* scale = nullptr;       // [kv_head, dim], written by the first iteration
  float* means = nullptr;       // [kv_head, book, centroid, sub_dim]
  uint16_t* rounded = nullptr;  // the means in f16; what is too large is the largest
  int32_t* counts = nullptr;    // [kv_head, book, centroid]: n_c
  // Whether scales are the root mean square of each channel, or 1.
  bool channel_scale = false;
  uint64_t seed = 0;
  int32_t batch_vectors = 0;
  int32_t first_iteration = 0;  // 0 begins anew
  int32_t iterations = 0;
  // The first token of the first kv head with a number that is not finite, or -1; set by the first iteration.
  int64_t* bad_head = nullptr;
  int64_t* bad_token = nullptr;
};

// Refuses CUDA devices (capability) and keys with a number that is not finite (invalid_value).
Status train_codebook(const TrainCodebookArguments& arguments, ExecutionContext& context);

}  // namespace kv
