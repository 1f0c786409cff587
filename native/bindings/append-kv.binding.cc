#include "kernels/append-kv/append-kv.h"

#include "bindings/paged-batch.h"

namespace kv {

namespace {

RopeArguments turn_in_place(const OutputArgument& rows) {
  RopeArguments turn;
  turn.input = turn.output = rows.data;
  turn.input_token_stride = turn.output_token_stride = rows.stride(0);
  turn.input_head_stride = turn.output_head_stride = rows.stride(1);
  turn.dtype = rows.dtype();
  turn.tokens = rows.extent(0);
  turn.heads = rows.extent(1);
  turn.head_dim = rows.extent(2);
  return turn;
}

}  // namespace

// appendKv(stream, keys, values [token, kvHead, dim], the six arguments of describe_cache; and where it turns the rows
// first: query [token, queryHead, dim], positions [token], inverseFrequencies [pair], interleaved, attentionScale)
Napi::Value append_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(1);
  const TensorArgument values = call.tensor(2);
  AppendKvArguments arguments;
  describe_pool(call.tensor(3), arguments);
  describe_tables(call, 5, keys.extent(0), arguments);
  arguments.keys = keys.data;
  arguments.values = values.data;
  arguments.row_token_stride = keys.stride(0);
  arguments.row_head_stride = keys.stride(1);
  arguments.row_dtype = keys.dtype();
  arguments.key_pool = call.output(3).data;
  arguments.value_pool = call.output(4).data;
  arguments.turns = info.Length() > 9;
  if (arguments.turns) {
    arguments.turned_queries = turn_in_place(call.output(9));
    arguments.turned_keys = turn_in_place(call.output(1));
    for (RopeArguments* turn : {&arguments.turned_queries, &arguments.turned_keys}) {
      turn->positions = call.tensor(10).as<int32_t>();
      turn->inverse_frequencies = call.tensor(11).as<float>();
      turn->pairs = call.tensor(11).extent(0);
      turn->convention = call.flag(12) ? RopeConvention::interleaved : RopeConvention::half_split;
      turn->attention_scale = static_cast<float>(call.number(13));
    }
  }
  return call.enqueue("appendKv",
                      [arguments](ExecutionContext& context) { return append_kv(arguments, context); });
}

}  // namespace kv
