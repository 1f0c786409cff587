#include "kernels/decode-attention-listed/decode-attention-listed.h"

#include "runtime/device.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/row-lists/run-over-lists.h"

namespace kv {

KV_CPU_KERNEL(decode_attention_listed, DecodeAttentionListedArguments)

Status decode_attention_listed(const DecodeAttentionListedArguments& arguments, ExecutionContext& context) {
  const auto part = [a = arguments](HostContext& host) mutable {
    return run_over_lists(a, host, [&a](int64_t* list_outside, ExecutionContext& on_host) {
      a.list_outside = list_outside;
      decode_attention_listed_cpu(a, on_host);
    });
  };
  return context.queue->run_on_host(part, context);
}

}  // namespace kv
