#include "kernels/decompose-attention/decompose-attention.h"

#include "bindings/paged-batch.h"

namespace kv {

// decomposeAttention(stream, query [token, queryHead, dim], inverseFrequencies [pair], state [byte],
//                    slash [queryHead, token], vertical [queryHead, token], horizontal [queryHead, row],
//                    the six arguments of describe_cache, scale, interleaved, attentionScale, seenTokens,
//                    sinkTokens, diagonalTokens, samples, seed, ridge, formulas)
Napi::Value decompose_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument inverse_frequencies = call.tensor(2);
  const OutputArgument state = call.output(3);
  const OutputArgument slash = call.output(4);
  const OutputArgument horizontal = call.output(6);
  DecomposeAttentionArguments arguments;
  describe_cache(call, 7, call.tensor(1), arguments);
  arguments.inverse_frequencies = inverse_frequencies.as<float>();
  arguments.pairs = static_cast<int32_t>(inverse_frequencies.extent(0));
  arguments.state = state.as<double>();
  arguments.state_values = state.extent(0) / static_cast<int64_t>(sizeof(double));
  arguments.slash = slash.as<float>();
  arguments.vertical = call.output(5).as<float>();
  arguments.horizontal = horizontal.as<float>();
  arguments.tokens = static_cast<int32_t>(slash.extent(1));
  arguments.rows = static_cast<int32_t>(horizontal.extent(1));
  arguments.scale = static_cast<float>(call.number(13));
  arguments.convention = call.flag(14) ? RopeConvention::interleaved : RopeConvention::half_split;
  arguments.attention_scale = static_cast<float>(call.number(15));
  arguments.seen_tokens = static_cast<int32_t>(call.integer(16));
  arguments.sink_tokens = static_cast<int32_t>(call.integer(17));
  arguments.diagonal_tokens = static_cast<int32_t>(call.integer(18));
  arguments.samples = static_cast<int32_t>(call.integer(19));
  arguments.seed = static_cast<uint64_t>(call.integer(20));
  arguments.ridge = call.number(21);
  arguments.formulas = static_cast<DecompositionFormulas>(call.integer(22));
  return call.enqueue("decomposeAttention", [arguments](ExecutionContext& context) {
    return decompose_attention(arguments, context);
  });
}

}  // namespace kv
