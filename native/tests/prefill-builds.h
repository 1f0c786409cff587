// Every build of prefill attention: one for each instruction set that this processor has, and one for tile registers
// that are emulated.
#pragma once

#include "kernels/block-sparse-attention/block-sparse-attention.h"
#include "kernels/prefill-attention-24/prefill-attention-24.h"
#include "kernels/prefill-attention/prefill-attention.h"
#include "shared/attention/prefill/tiled-caches.h"
#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {

#if defined(__x86_64__)
namespace emulated {
void prefill_attention(const PagedAttentionArguments&, Workers&);
void prefill_attention_24(const Attention24Arguments&, Workers&);
void block_sparse_attention(const BlockSparseAttentionArguments&, Workers&);
}  // namespace emulated
#endif

struct PrefillBuild {
  Status (*dense)(const PagedAttentionArguments&, ExecutionContext&);
  Status (*blocks_24)(const Attention24Arguments&, ExecutionContext&);
  Status (*listed)(const BlockSparseAttentionArguments&, ExecutionContext&);
  Isa isa;
  bool tiled;  // for caches in bf16
};

// What Isa::amx does, with emulated tile registers.
template <auto operation, auto emulated, class Arguments>
Status emulate_tiles(const Arguments& arguments, ExecutionContext& context) {
  if (for_prefill(arguments, {context.workers, Isa::amx}).isa != Isa::amx) return operation(arguments, context);
  emulated(arguments, context.workers);
  return Status::success();
}

template <class Body>
void on_every_prefill(Body&& body) {
  constexpr Status (*dense)(const PagedAttentionArguments&, ExecutionContext&) = prefill_attention;
  constexpr Status (*blocks_24)(const Attention24Arguments&, ExecutionContext&) = prefill_attention_24;
  constexpr Status (*listed)(const BlockSparseAttentionArguments&, ExecutionContext&) = block_sparse_attention;
  on_every_isa([&](Isa isa) { body(PrefillBuild{dense, blocks_24, listed, isa, isa == Isa::amx}); });
#if defined(__x86_64__)
  if (!runs(Isa::avx512)) return;
  body(PrefillBuild{emulate_tiles<dense, emulated::prefill_attention, PagedAttentionArguments>,
                    emulate_tiles<blocks_24, emulated::prefill_attention_24, Attention24Arguments>,
                    emulate_tiles<listed, emulated::block_sparse_attention, BlockSparseAttentionArguments>, Isa::avx512, true});
#endif
}

}  // namespace kv
