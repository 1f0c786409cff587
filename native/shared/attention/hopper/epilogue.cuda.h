// The end of a work tile: each consumer warp writes the outputs and log-sum-exps of its 16 queries. It needs no
// barrier, because each warp has staging memory of its own. Device code.
#pragma once

#include "ptx/matrix-load.cuda.h"
#include "shared/attention/online-softmax.cuda.h"
#include "shared/attention/work-tile.cuda.h"

namespace kv::sm90a {

// `warp` counts over all consumers. `staging` is this warp's shared memory. `output` is this thread's part of the
// wgmma accumulator.
template <typename Element, int kHeadDim>
__device__ void store_outputs(const PagedAttentionArguments& arguments, const PrefillTile& work, int warp,
                              const OnlineSoftmax& softmax, const float (&output)[kHeadDim / 2],
                              Element (&staging)[16][kHeadDim]) {
  const int lane = threadIdx.x % 32;
  // The outputs go through shared memory, so that whole rows are written. 16-byte chunks are permuted to avoid bank
  // conflicts.
  const float normalizer[2] = {OnlineSoftmax::normalizer(softmax.sum(0)),
                               OnlineSoftmax::normalizer(softmax.sum(1))};
  const int matrix = lane / 8;
  const int matrix_row = matrix % 2 * 8 + lane % 8;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; i += 8) {
    const int chunk = (i / 4 + matrix / 2) ^ (lane % 8);
    const uint32_t fragment[4] = {
        ptx::pack<Element>(output[i] * normalizer[0], output[i + 1] * normalizer[0]),
        ptx::pack<Element>(output[i + 2] * normalizer[1], output[i + 3] * normalizer[1]),
        ptx::pack<Element>(output[i + 4] * normalizer[0], output[i + 5] * normalizer[0]),
        ptx::pack<Element>(output[i + 6] * normalizer[1], output[i + 7] * normalizer[1])};
    ptx::store_matrices(&staging[matrix_row][chunk * 8], fragment);
  }
  __syncwarp();
  constexpr int kChunks = kHeadDim / 8;
  Element* rows = static_cast<Element*>(arguments.output) +
                  (int64_t{work.first_row} + work.first_query + warp * 16) * arguments.output_token_stride +
                  work.query_head * arguments.output_head_stride;
  const int rows_left = work.query_count - work.first_query - warp * 16;
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int staged_row = i / kChunks;
    const int chunk = i % kChunks;
    if (staged_row >= rows_left) break;
    *reinterpret_cast<uint4*>(rows + staged_row * arguments.output_token_stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(&staging[staged_row][(chunk ^ (staged_row % 8)) * 8]);
  }
  if (arguments.log_sum_exp == nullptr || lane % 4 != 0) return;
  for (int half = 0; half < 2; ++half) {
    const int query = work.first_query + warp * 16 + lane / 4 + 8 * half;
    if (query >= work.query_count) break;
    arguments.log_sum_exp[(int64_t{work.first_row} + query) * arguments.query_heads + work.query_head] =
        OnlineSoftmax::log_sum_exp(softmax.reference(half), softmax.sum(half));
  }
}

}  // namespace kv::sm90a
