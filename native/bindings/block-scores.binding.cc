#include "kernels/block-scores/block-scores.h"

#include "bindings/operation-call.h"

namespace kv {

// blockScores(stream, query [token, queryHead, dim], scores [token, kvHead, block], metadata [metadataBlock, vector, dim],
//             blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary], blockTokens)
Napi::Value block_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  const TensorArgument metadata = call.tensor(3);
  const TensorArgument table = call.tensor(4);
  const OutputArgument counts = call.output(5);
  const TensorArgument slots = call.tensor(6);
  BlockScoresArguments arguments;
  arguments.batch = static_cast<int32_t>(slots.extent(0));
  arguments.kv_heads = static_cast<int32_t>(counts.extent(1));
  arguments.head_dim = static_cast<int32_t>(query.extent(2));
  arguments.query_start = call.tensor(7).as<int32_t>();
  arguments.query_tokens = static_cast<int32_t>(query.extent(0));
  arguments.slots = slots.as<int32_t>();
  arguments.cache_dtype = metadata.dtype();
  arguments.block_stride = metadata.stride(0);
  arguments.block_tokens = static_cast<int32_t>(call.integer(8));
  arguments.block_count = static_cast<int32_t>(metadata.extent(0));
  arguments.block_table = table.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(table.extent(2));
  arguments.key_counts = counts.as<int32_t>();
  arguments.slot_count = static_cast<int32_t>(counts.extent(0));
  arguments.query = query.data;
  arguments.query_token_stride = query.stride(0);
  arguments.query_head_stride = query.stride(1);
  arguments.query_dtype = query.dtype();
  arguments.query_heads = static_cast<int32_t>(query.extent(1));
  arguments.metadata = metadata.data;
  arguments.vectors = static_cast<int32_t>(metadata.extent(1));
  arguments.scores = scores.as<float>();
  arguments.score_token_stride = scores.stride(0);
  arguments.score_head_stride = scores.stride(1);
  return call.enqueue("blockScores", [arguments](ExecutionContext& context) { return block_scores(arguments, context); });
}

}  // namespace kv
