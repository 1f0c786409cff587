// Which keys a work tile reads, and in which order. `KeyTiles` is the parameter of the attention loop's parts. The
// producer and each consumer walk over the same key tiles, each with a walk of its own. Device code.
//
// A key tile is kRuns runs of equally many keys. The keys of a run are consecutive in the sequence; the first is a
// multiple of the run's length. Keys from key_count on do not exist. A KeyTiles has these members:
//   Arguments  PagedAttentionArguments, and what else the walk reads.
//   Work       The numbering of the work tiles. Work::Tile is a PrefillTile; its `key_tiles` is the walk's length.
//   kRuns      The number of runs.
//   Tile       last(): no tile follows. hides(): some query of the work tile may not see some key of the tile.
//              first_key(run), of a tile that hides keys: the run's first key; key_count if it has no keys.
//   Walk       tile(): the current tile. advance(), more(). hides(): the current tile or a later one hides keys. The
//              loop masks tiles as long as hides() is true, and masks none after that.
//   Box        Where this lane's box of a key tile lies in the pools. The box fills the tile's rows from
//              lane * box_tokens on.
//   Boxes      first(tile) gives the box in the first tile, after(box, tile) the box in each next tile.
#pragma once

#include <cstdint>

#include "shared/attention/work-tile.cuda.h"

namespace kv::sm90a {

// Paged attention with a table for keys, `block_table`, and one for values.
struct SplitTableArguments : PagedAttentionArguments {
  const int32_t* value_table = nullptr;  // names the blocks of values; as large as `block_table`, often the same
};

// All keys that a query of the work tile sees, from the last key to the first.
template <int kQueryTile, int kKeyTile>
struct ContiguousKeyTiles {
  using Arguments = SplitTableArguments;
  using Work = PrefillWork<kQueryTile, kKeyTile>;
  static constexpr int kRuns = 1;

  struct Tile {
    int number;  // 0 for the tile of the first keys

    __device__ bool last() const { return number <= 0; }
    __device__ int first_key(int) const { return number * kKeyTile; }
    __device__ static constexpr bool hides() { return true; }  // asked only while the walk hides keys
  };

  class Walk {
   public:
    __device__ Walk(const Arguments&, const PrefillTile& work) : work_(work), tile_{work.key_tiles - 1} {}

    __device__ Tile tile() const { return tile_; }
    __device__ void advance() { --tile_.number; }
    __device__ bool more() const { return tile_.number >= 0; }
    // The tiles that hide keys come first: those with keys that not every query sees.
    __device__ bool hides() const {
      return tile_.number >= max(0, min(work_.visible_keys, work_.key_count)) / kKeyTile;
    }

   private:
    const PrefillTile& work_;
    Tile tile_;
  };

  // The blocks are negative for lanes beyond the tile or beyond the last key.
  struct Box {
    int entry;  // index in a row of the block tables
    int token;  // index in the block
    int key_block;
    int value_block;
  };

  class Boxes {
   public:
    __device__ Boxes(const Arguments& arguments, int box_tokens, const PrefillTile& work)
        : block_tokens_(arguments.block_tokens),
          row_in_tile_(threadIdx.x % 32 * box_tokens),
          key_count_(work.key_count) {
      const int64_t row = int64_t{work.slot} * arguments.kv_heads + work.kv_head;
      key_table_ = arguments.block_table + row * arguments.table_width;
      value_table_ = arguments.value_table + row * arguments.table_width;
    }

    __device__ Box first(Tile tile) const {
      const int token = tile.first_key(0) + row_in_tile_;
      Box box;
      box.entry = token / block_tokens_;
      box.token = token - box.entry * block_tokens_;
      const bool present = row_in_tile_ < kKeyTile && token < key_count_;
      box.key_block = present ? key_table_[box.entry] : -1;
      box.value_block = present ? value_table_[box.entry] : -1;
      return box;
    }

    // The box in the next tile. All keys of that tile are present.
    __device__ Box after(Box box, Tile) const {
      box.token -= kKeyTile;
      while (box.token < 0) {
        box.token += block_tokens_;
        --box.entry;
      }
      if (row_in_tile_ < kKeyTile) {
        box.key_block = key_table_[box.entry];
        box.value_block = value_table_[box.entry];
      }
      return box;
    }

   private:
    const int block_tokens_;
    const int row_in_tile_;
    const int key_count_;
    const int32_t* key_table_;
    const int32_t* value_table_;
  };
};

}  // namespace kv::sm90a
