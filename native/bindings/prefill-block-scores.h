// Reads what every estimate of block scores takes.
#pragma once

#include "bindings/paged-batch.h"
#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {

// (stream, query [token, queryHead, dim], scores [queryHead, queryTile, keyBlock], the six arguments of
// describe_cache, scale)
template <class Arguments>
Arguments block_scores_arguments(OperationCall& call) {
  const OutputArgument scores = call.output(2);
  Arguments arguments;
  describe_cache(call, 3, call.tensor(1), arguments);
  arguments.scores = scores.as<float>();
  arguments.tiles = static_cast<int32_t>(scores.extent(1));
  arguments.blocks = static_cast<int32_t>(scores.extent(2));
  arguments.scale = static_cast<float>(call.number(9));
  return arguments;
}

}  // namespace kv
