#include "kernels/select-key-blocks/select-key-blocks.h"

#include "bindings/operation-call.h"

namespace kv {

// selectKeyBlocks(stream, slash [queryHead, token], vertical [queryHead, token], horizontal [queryHead, row],
//                 scores [queryHead, queryTile, keyBlock], keyBlocks [queryHead, queryTile, listedBlock],
//                 keyBlockCounts [queryHead, queryTile], tileBlocks [queryHead, 1] or undefined, tokens, rows, tileRows, sinkTokens, diagonalTokens, denseRows,
//                 bound, rule, threshold, share); either scores or the other three are undefined
Napi::Value select_key_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument key_blocks = call.output(5);
  SelectKeyBlocksArguments arguments;
  arguments.slash = call.optional_tensor(1).as<float>();
  arguments.vertical = call.optional_tensor(2).as<float>();
  arguments.horizontal = call.optional_tensor(3).as<float>();
  arguments.scores = call.optional_tensor(4).as<float>();
  arguments.query_heads = static_cast<int32_t>(key_blocks.extent(0));
  arguments.key_blocks = key_blocks.as<int32_t>();
  arguments.capacity = static_cast<int32_t>(key_blocks.extent(2));
  arguments.counts = call.output(6).as<int32_t>();
  const TensorArgument tile_blocks = call.optional_tensor(7);
  arguments.tile_blocks = tile_blocks.as<int32_t>();
  arguments.tile_blocks_stride = tile_blocks ? tile_blocks.stride(0) : 0;
  arguments.tokens = static_cast<int32_t>(call.integer(8));
  arguments.rows = static_cast<int32_t>(call.integer(9));
  arguments.tile_rows = static_cast<int32_t>(call.integer(10));
  arguments.sink_tokens = static_cast<int32_t>(call.integer(11));
  arguments.diagonal_tokens = static_cast<int32_t>(call.integer(12));
  arguments.dense_rows = static_cast<int32_t>(call.integer(13));
  arguments.bound = static_cast<SlashBound>(call.integer(14));
  arguments.rule = static_cast<BlockRule>(call.integer(15));
  arguments.threshold = static_cast<float>(call.number(16));
  arguments.share = call.number(17);
  return call.enqueue("selectKeyBlocks", [arguments](ExecutionContext& context) {
    return select_key_blocks(arguments, context);
  });
}

}  // namespace kv
