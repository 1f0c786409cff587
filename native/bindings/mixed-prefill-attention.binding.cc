#include "kernels/mixed-prefill-attention/mixed-prefill-attention.h"

#include "bindings/mixed-blocks.h"

namespace kv {

// mixedPrefillAttention: the arguments of mixed_attention_arguments.
Napi::Value mixed_prefill_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const MixedAttentionArguments arguments = mixed_attention_arguments(call);
  return call.enqueue("mixedPrefillAttention", [arguments](ExecutionContext& context) {
    return mixed_prefill_attention(arguments, context);
  });
}

}  // namespace kv
