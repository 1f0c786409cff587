#include "kernels/select-key-blocks/select-key-blocks.h"

#include "bindings/operation-call.h"

namespace kv {

// selectKeyBlocks(stream, slash [queryHead, token], vertical [queryHead, token], horizontal [queryHead, row],
//                 keyBlocks [queryHead, queryTile, listedBlock], keyBlockCounts [queryHead, queryTile], tileRows,
//                 sinkTokens, diagonalTokens, denseRows, bound, threshold, budget or undefined)
Napi::Value select_key_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument slash = call.tensor(1);
  const TensorArgument horizontal = call.tensor(3);
  const OutputArgument key_blocks = call.output(4);
  SelectKeyBlocksArguments arguments;
  arguments.slash = slash.as<float>();
  arguments.vertical = call.tensor(2).as<float>();
  arguments.horizontal = horizontal.as<float>();
  arguments.query_heads = static_cast<int32_t>(slash.extent(0));
  arguments.tokens = static_cast<int32_t>(slash.extent(1));
  arguments.rows = static_cast<int32_t>(horizontal.extent(1));
  arguments.key_blocks = key_blocks.as<int32_t>();
  arguments.capacity = static_cast<int32_t>(key_blocks.extent(2));
  arguments.counts = call.output(5).as<int32_t>();
  arguments.tile_rows = static_cast<int32_t>(call.integer(6));
  arguments.sink_tokens = static_cast<int32_t>(call.integer(7));
  arguments.diagonal_tokens = static_cast<int32_t>(call.integer(8));
  arguments.dense_rows = static_cast<int32_t>(call.integer(9));
  arguments.bound = static_cast<SlashBound>(call.integer(10));
  arguments.threshold = static_cast<float>(call.number(11));
  arguments.by_budget = !info[12].IsUndefined();
  if (arguments.by_budget) arguments.budget = call.number(12);
  return call.enqueue("selectKeyBlocks", [arguments](ExecutionContext& context) {
    return select_key_blocks(arguments, context);
  });
}

}  // namespace kv
