// Block-sparse attention for Hopper: the attention loop over the listed blocks, two in each key tile.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/block-sparse-attention/block-sparse-attention.cuda.h"
#include "shared/attention/hopper/attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/cuda/divisor.cuda.h"

namespace kv::sm90a {
namespace {

// The blocks of a list from the last to the first, two in each key tile. The first two blocks are a pair, and so on. So
// a list of all blocks has the key tiles of dense attention, and gives the same bits.
struct ListedKeyTiles {
  using Arguments = ListedArguments;
  using Work = ListedWork;
  static constexpr int kRuns = 2;

  struct Tile {
    const ListedTile* work;
    int number;  // in the order of the keys

    __device__ bool last() const { return number <= 0; }
    __device__ int first_key(int run) const {
      return number == work->key_tiles - 1 ? work->last_first_keys[0][run] : work->last_first_keys[1][run];
    }
    // The keys that only some rows see lie in three blocks at most. Those that are listed are in the last two tiles.
    __device__ bool hides() const {
      return number >= work->key_tiles - 2 && first_key(1) + kKeyBlockTokens > min(work->visible_keys, work->key_count);
    }
  };

  class Walk {
   public:
    __device__ Walk(const Arguments&, const ListedTile& work) : tile_{&work, work.key_tiles - 1} {}

    __device__ Tile tile() const { return tile_; }
    __device__ void advance() { --tile_.number; }
    __device__ bool more() const { return tile_.number >= 0; }
    __device__ bool hides() const { return more() && tile_.hides(); }

   private:
    Tile tile_;
  };

  // Blocks are negative for lanes that are past the tile or past the last key.
  struct Box {
    int token;  // in the block
    int key_block;
    int value_block;
  };

  class Boxes {
   public:
    __device__ Boxes(const Arguments& arguments, int box_tokens, const ListedTile& work)
        : block_tokens_(arguments.block_tokens),
          block_shift_(shift_of(arguments.block_tokens)),
          row_in_tile_(threadIdx.x % 32 * box_tokens),
          work_(work),
          table_(arguments.block_table +
                 (int64_t{work.slot} * arguments.kv_heads + work.kv_head) * arguments.table_width) {}

    __device__ Box first(Tile tile) const { return box_of(tile); }
    __device__ Box after(Box, Tile tile) const { return box_of(tile); }

   private:
    __device__ Box box_of(Tile tile) const {
      Box box{0, -1, -1};
      const int place = 2 * tile.number + row_in_tile_ / kKeyBlockTokens;
      if (row_in_tile_ >= 2 * kKeyBlockTokens || place >= work_.listed) return box;
      const int key = work_.blocks[place] * kKeyBlockTokens + row_in_tile_ % kKeyBlockTokens;
      if (key >= work_.key_count) return box;
      const int entry = block_shift_ >= 0 ? key >> block_shift_ : key / block_tokens_;
      box.token = key - entry * block_tokens_;
      box.key_block = box.value_block = table_[entry];
      return box;
    }

    const int block_tokens_;
    const int block_shift_;
    const int row_in_tile_;
    const ListedTile& work_;
    const int32_t* table_;
  };
};

template <typename Element, int kHeadDim>
Status launch(const ListedArguments& arguments, void* workspace, cudaStream_t stream) {
  using Shape = AttentionShape<Element, kHeadDim, 2>;
  static_assert(Shape::kQueryTile == kListedQueryTile && Shape::kKeyTile == 2 * kKeyBlockTokens);
  return launch_attention<Shape, ListedKeyTiles>(arguments, workspace, stream);
}

template <typename Element>
Status launch_for_head_dim(const ListedArguments& arguments, void* workspace, cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Element, 64>(arguments, workspace, stream)
                                  : launch<Element, 128>(arguments, workspace, stream);
}

}  // namespace

Status block_sparse_attention(const PagedAttentionArguments& arguments, const ListedPlan& plan, void* workspace,
                              cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, kBlockSparseBlockMultiple)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core block-sparse attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const ListedArguments listed{arguments, plan};
  return arguments.cache_dtype == DType::f16 ? launch_for_head_dim<__half>(listed, workspace, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(listed, workspace, stream);
}

}  // namespace kv::sm90a
