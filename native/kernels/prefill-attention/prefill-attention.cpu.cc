#include "kernels/prefill-attention/prefill-attention.h"

#include "shared/attention/prefill/dense-cache.cpu.h"

namespace kv {
namespace KV_ISA {

void prefill_attention(const PagedAttentionArguments& a, Workers& workers) {
  with_cache_type(a, [&](auto element) { prefill_panels(a, DenseCache<decltype(element)>{a}, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
