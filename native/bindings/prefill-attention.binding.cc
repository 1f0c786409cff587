#include "kernels/prefill-attention/prefill-attention.h"

#include "bindings/paged-batch.h"

namespace kv {

Napi::Value prefill_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const PagedAttentionArguments arguments = paged_attention_arguments(call);
  return call.enqueue("prefillAttention", [arguments](ExecutionContext& context) {
    return prefill_attention(arguments, context);
  });
}

}  // namespace kv
