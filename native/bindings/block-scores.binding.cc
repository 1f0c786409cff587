#include "kernels/block-scores/block-scores.h"

#include "bindings/paged-batch.h"

namespace kv {

// blockScores(stream, query [token, queryHead, dim], scores [token, kvHead, block], metadata [metadataBlock, vector, dim],
//             blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary], blockTokens)
Napi::Value block_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  const TensorArgument metadata = call.tensor(3);
  BlockScoresArguments arguments;
  describe_tables(call, 4, query.extent(0), arguments);
  describe_query(query, arguments);
  arguments.cache_dtype = metadata.dtype();
  arguments.block_stride = metadata.stride(0);
  arguments.block_tokens = static_cast<int32_t>(call.integer(8));
  arguments.block_count = static_cast<int32_t>(metadata.extent(0));
  arguments.metadata = metadata.data;
  arguments.vectors = static_cast<int32_t>(metadata.extent(1));
  arguments.scores = scores.as<float>();
  arguments.score_token_stride = scores.stride(0);
  arguments.score_head_stride = scores.stride(1);
  return call.enqueue("blockScores", [arguments](ExecutionContext& context) { return block_scores(arguments, context); });
}

}  // namespace kv
