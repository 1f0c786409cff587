#include "kernels/mixed-decode-attention/mixed-decode-attention.h"

#include "bindings/mixed-blocks.h"

namespace kv {

// mixedDecodeAttention: the arguments of mixed_attention_arguments.
Napi::Value mixed_decode_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const MixedAttentionArguments arguments = mixed_attention_arguments(call);
  return call.enqueue("mixedDecodeAttention", [arguments](ExecutionContext& context) {
    return mixed_decode_attention(arguments, context);
  });
}

}  // namespace kv
