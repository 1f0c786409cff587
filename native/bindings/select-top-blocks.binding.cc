#include "kernels/select-top-blocks/select-top-blocks.h"

#include "bindings/paged-batch.h"

namespace kv {

// selectTopBlocks(stream, scores [token, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary],
//                 chosen [slot, kvHead, chosenBlock], chosenCounts [slot, kvHead], budgets [slot], blockTokens, sinkBlocks,
//                 recentBlocks)
Napi::Value select_top_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument scores = call.tensor(1);
  const OutputArgument chosen = call.output(5);
  SelectTopBlocksArguments arguments;
  describe_sequences(call, 2, scores.extent(0), arguments);
  arguments.table_width = static_cast<int32_t>(scores.extent(2));
  arguments.scores = scores.as<float>();
  arguments.score_token_stride = scores.stride(0);
  arguments.score_head_stride = scores.stride(1);
  arguments.room = static_cast<int32_t>(chosen.extent(2));
  arguments.chosen = chosen.as<int32_t>();
  arguments.chosen_counts = call.output(6).as<int32_t>();
  arguments.budgets = call.tensor(7).as<int32_t>();
  arguments.block_tokens = static_cast<int32_t>(call.integer(8));
  arguments.sink_blocks = static_cast<int32_t>(call.integer(9));
  arguments.recent_blocks = static_cast<int32_t>(call.integer(10));
  return call.enqueue("selectTopBlocks", [arguments](ExecutionContext& context) { return select_top_blocks(arguments, context); });
}

}  // namespace kv
