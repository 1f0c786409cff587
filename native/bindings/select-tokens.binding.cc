#include "kernels/select-tokens/select-tokens.h"

#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {

// selectTokens(stream, scores [batch, kvHead, token], rows [batch, kvHead, 4] of prefixTokens, windowTokens,
//              capacity, blockTokens, indices [batch, kvHead, kept], counts [batch, kvHead],
//              rounds: Int32Array, overlappingRounds, fill, sinkTokens, pooling, poolTokens)
Napi::Value select_tokens(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument scores = call.tensor(1);
  const OutputArgument indices = call.output(3);
  SelectTokensArguments arguments;
  arguments.scores = scores.as<float>();
  arguments.score_tokens = static_cast<int32_t>(scores.extent(2));
  arguments.rows = call.tensor(2).as<SelectTokensRow>();
  arguments.row_count = static_cast<int32_t>(scores.extent(0) * scores.extent(1));
  arguments.indices = indices.as<int32_t>();
  arguments.index_tokens = static_cast<int32_t>(indices.extent(2));
  arguments.counts = call.output(4).as<int32_t>();
  const ArrayBytes given = array_bytes(info[5]);
  const auto* rounds = reinterpret_cast<const int32_t*>(given.data);
  arguments.round_count = static_cast<int32_t>(given.bytes / sizeof(int32_t));
  for (int32_t round = 0; round < arguments.round_count && round < SelectTokensArguments::kMaxRounds; ++round) {
    arguments.rounds[round] = rounds[round];
  }
  arguments.overlapping_rounds = call.flag(6);
  arguments.fill = call.flag(7);
  arguments.sink_tokens = static_cast<int32_t>(call.integer(8));
  arguments.pooling = static_cast<ScorePooling>(call.integer(9));
  arguments.pool_tokens = static_cast<int32_t>(call.integer(10));
  return call.enqueue("selectTokens", [arguments](ExecutionContext& context) {
    return select_tokens(arguments, context);
  });
}

}  // namespace kv
