#include "kernels/merge-attention/merge-attention.h"

#include "bindings/operation-call.h"

namespace kv {

// mergeAttention(stream, output [token, queryHead, dim], logSumExp [token, queryHead], other output, other logSumExp)
Napi::Value merge_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument output = call.output(1);
  const OutputArgument log_sum_exp = call.output(2);
  const TensorArgument other = call.tensor(3);
  MergeAttentionArguments arguments;
  arguments.output = output.data;
  arguments.output_token_stride = output.stride(0);
  arguments.output_head_stride = output.stride(1);
  arguments.dtype = output.dtype();
  arguments.log_sum_exp = log_sum_exp.as<float>();
  arguments.other = other.data;
  arguments.other_token_stride = other.stride(0);
  arguments.other_head_stride = other.stride(1);
  arguments.other_dtype = other.dtype();
  arguments.other_log_sum_exp = call.tensor(4).as<float>();
  arguments.tokens = output.extent(0);
  arguments.query_heads = output.extent(1);
  arguments.head_dim = output.extent(2);
  return call.enqueue("mergeAttention",
                      [arguments](ExecutionContext& context) { return merge_attention(arguments, context); });
}

}  // namespace kv
