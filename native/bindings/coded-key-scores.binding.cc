#include "kernels/coded-key-scores/coded-key-scores.h"

#include "bindings/coded-keys.h"

namespace kv {

// codedKeyScores(stream, query [token, queryHead, dim], scores [token, queryHead, key], codedKeys [codedBlock, byte],
// centroids [kvHead, book, centroid, subDim], channelScale [kvHead, dim] or undefined, codeBits,
// blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary], scale)
Napi::Value coded_key_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const OutputArgument scores = call.output(2);
  const TensorArgument table = call.tensor(7);
  const OutputArgument counts = call.output(8);
  const TensorArgument slots = call.tensor(9);
  CodedKeyScoresArguments arguments;
  describe_coded_keys(call, 3, query.extent(2), arguments.coded);
  arguments.batch = static_cast<int32_t>(slots.extent(0));
  arguments.kv_heads = static_cast<int32_t>(counts.extent(1));
  arguments.head_dim = static_cast<int32_t>(query.extent(2));
  arguments.query_start = call.tensor(10).as<int32_t>();
  arguments.query_tokens = static_cast<int32_t>(query.extent(0));
  arguments.slots = slots.as<int32_t>();
  arguments.block_count = arguments.coded.block_count;
  arguments.block_table = table.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(table.extent(2));
  arguments.key_counts = counts.as<int32_t>();
  arguments.slot_count = static_cast<int32_t>(counts.extent(0));
  arguments.query = query.data;
  arguments.query_token_stride = query.stride(0);
  arguments.query_head_stride = query.stride(1);
  arguments.query_dtype = query.dtype();
  arguments.query_heads = static_cast<int32_t>(query.extent(1));
  arguments.scores = scores.as<float>();
  arguments.score_token_stride = scores.stride(0);
  arguments.score_head_stride = scores.stride(1);
  arguments.scale = static_cast<float>(call.number(11));
  return call.enqueue("codedKeyScores",
                      [arguments](ExecutionContext& context) { return coded_key_scores(arguments, context); });
}

}  // namespace kv
