#include "kernels/decode-attention-listed/decode-attention-listed.h"

#include "bindings/row-lists.h"

namespace kv {

// decodeAttentionListed(stream, query [token, queryHead, dim], keys [valueBlock, blockToken, dim],
//                       values [valueBlock, blockToken, dim], valueScales [valueBlock, blockToken] or undefined,
//                       valueRows [token, kvHead, chosen], counts [token, kvHead], output [token, queryHead, dim],
//                       logSumExp [token, queryHead], scale)
Napi::Value decode_attention_listed(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const TensorArgument keys = call.tensor(2);
  const TensorArgument values = call.tensor(3);
  const TensorArgument scales = call.optional_tensor(4);
  const TensorArgument rows = call.tensor(5);
  const TensorArgument counts = call.tensor(6);
  const OutputArgument output = call.output(7);
  const OutputArgument log_sum_exp = call.output(8);
  expect_on_host(call, info,
                 query.on_host && keys.on_host && values.on_host && (!scales || scales.on_host) && rows.on_host &&
                     counts.on_host && output.on_host && log_sum_exp.on_host);
  DecodeAttentionListedArguments arguments;
  read_row_lists(rows, counts, values, arguments);
  arguments.group = static_cast<int32_t>(query.extent(1) / rows.extent(1));
  arguments.query = query.data;
  arguments.query_dtype = query.dtype();
  arguments.query_row_stride = query.stride(0);
  arguments.query_head_stride = query.stride(1);
  arguments.keys = keys.data;
  arguments.key_dtype = keys.dtype();
  arguments.values = values.data;
  arguments.value_dtype = values.dtype();
  arguments.value_scales = scales.as<uint16_t>();
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.scale = static_cast<float>(call.number(9));
  arguments.output = output.as<float>();
  arguments.log_sum_exp = log_sum_exp.as<float>();
  return call.enqueue("decodeAttentionListed",
                      [arguments](ExecutionContext& context) { return decode_attention_listed(arguments, context); });
}

}  // namespace kv
