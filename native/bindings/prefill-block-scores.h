// Reads what every estimate of block scores takes.
#pragma once

#include "bindings/paged-batch.h"
#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {

// (stream, query [token, queryHead, dim], scores [queryHead, queryTile, keyBlock], the six arguments of
// PagedBatchTensors, scale)
template <class Arguments>
Arguments block_scores_arguments(OperationCall& call) {
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  const PagedBatchTensors tensors(call, 3);
  Arguments arguments;
  tensors.describe(arguments, query);
  arguments.scores = scores.as<float>();
  arguments.tiles = static_cast<int32_t>(scores.extent(1));
  arguments.blocks = static_cast<int32_t>(scores.extent(2));
  arguments.scale = static_cast<float>(call.number(9));
  return arguments;
}

}  // namespace kv
