#include "kernels/decode-attention/decode-attention.h"

#include "bindings/paged-batch.h"

namespace kv {

Napi::Value decode_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const PagedAttentionArguments arguments = paged_attention_arguments(call);
  return call.enqueue("decodeAttention", [arguments](ExecutionContext& context) {
    return decode_attention(arguments, context);
  });
}

}  // namespace kv
