#include "kernels/prefill-attention-24/prefill-attention-24.h"

#include "bindings/blocks-24.h"

namespace kv {

// prefillAttention24: the arguments of attention_24_arguments.
Napi::Value prefill_attention_24(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const Attention24Arguments arguments = attention_24_arguments(call);
  return call.enqueue("prefillAttention24", [arguments](ExecutionContext& context) {
    return prefill_attention_24(arguments, context);
  });
}

}  // namespace kv
