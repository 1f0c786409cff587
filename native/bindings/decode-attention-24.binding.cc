#include "kernels/decode-attention-24/decode-attention-24.h"

#include "bindings/blocks-24.h"

namespace kv {

// decodeAttention24: the arguments of attention_24_arguments.
Napi::Value decode_attention_24(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const Attention24Arguments arguments = attention_24_arguments(call);
  return call.enqueue("decodeAttention24", [arguments](ExecutionContext& context) {
    return decode_attention_24(arguments, context);
  });
}

}  // namespace kv
