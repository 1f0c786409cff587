// Attention on Hopper: O = softmax(scale * Q K^T) V. It goes tile by tile, with running maxima and sums, so that
// scores never leave registers. Its parts:
//   key-tiles          which keys a work tile reads, and in which order; no other part knows this
//   persistent-blocks  the scheduler, which gives work tiles to thread blocks
//   storage            shared memory and its mbarriers
//   producer           one warp, which copies queries, keys and values by TMA
//   consumer           the main loop of a warpgroup; its softmax is shared/attention/online-softmax.cuda.h
//   epilogue           writes the outputs of a work tile
// Other Hopper kernels use tiles, pool-map, warp-roles and persistent-blocks without the rest.
#pragma once

#include "shared/attention/hopper/consumer.cuda.h"
#include "shared/attention/hopper/key-tiles.cuda.h"
#include "shared/attention/hopper/pool-map.cuda.h"
#include "shared/attention/hopper/producer.cuda.h"

namespace kv::sm90a {

template <class Shape, class KeyTiles>
__global__ void __launch_bounds__(Shape::Roles::kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParameters<KeyTiles> parameters) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<AttentionStorage<Shape, KeyTiles>*>(shared_memory);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  run_roles<typename Shape::Roles, AttentionProducer<Shape, KeyTiles>, AttentionConsumer<Shape, KeyTiles>>(parameters,
                                                                                                           shared);
}

// Enqueues the kernel on `stream` and returns. `workspace` is device memory for one unsigned, whose content does not
// matter. Launches that may run at the same time need one each. The arguments must pass fits_tensor_cores.
template <class Shape, class KeyTiles>
Status launch_attention(const typename KeyTiles::Arguments& arguments, void* workspace, cudaStream_t stream) {
  AttentionParameters<KeyTiles> parameters;
  parameters.arguments = arguments;
  parameters.box_tokens = common_box(arguments.block_tokens, Shape::kKeyTile / KeyTiles::kRuns);
  parameters.tiles_taken = static_cast<unsigned*>(workspace);
  TensorBox query;
  query.dtype = arguments.query_dtype;
  query.data = arguments.query;
  query.extents = {arguments.head_dim, arguments.query_heads, arguments.query_tokens};
  query.strides = {arguments.query_head_stride, arguments.query_token_stride};
  query.box = {kPanelColumns, 1, kWarpgroupRows};
  Status status = encode_tensor_map(query, &parameters.query);
  if (status.ok()) status = describe_pool(arguments, arguments.keys, parameters.box_tokens, &parameters.keys);
  if (status.ok()) status = describe_pool(arguments, arguments.values, parameters.box_tokens, &parameters.values);
  if (!status.ok()) return status;
  return launch_persistent(attention_kernel<Shape, KeyTiles>, parameters, Shape::Roles::kThreads,
                           sizeof(AttentionStorage<Shape, KeyTiles>), parameters.tiles_taken, stream);
}

}  // namespace kv::sm90a
