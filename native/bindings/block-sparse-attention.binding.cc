#include "kernels/block-sparse-attention/block-sparse-attention.h"

#include "bindings/paged-batch.h"

namespace kv {

// blockSparseAttention(those of paged_attention_arguments, keyBlocks [queryHead, queryTile, listedBlock],
//                      keyBlockCounts [queryHead, queryTile])
Napi::Value block_sparse_attention(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  BlockSparseAttentionArguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = paged_attention_arguments(call);
  const TensorArgument key_blocks = call.tensor(12);
  arguments.lists.blocks = key_blocks.as<int32_t>();
  arguments.lists.counts = call.tensor(13).as<int32_t>();
  arguments.lists.query_tiles = static_cast<int32_t>(key_blocks.extent(1));
  arguments.lists.capacity = static_cast<int32_t>(key_blocks.extent(2));
  return call.enqueue("blockSparseAttention", [arguments](ExecutionContext& context) {
    return block_sparse_attention(arguments, context);
  });
}

}  // namespace kv
