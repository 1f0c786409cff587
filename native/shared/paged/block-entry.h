// What an entry of a block table says of a block: which kind it is of, and its number in the pool of that kind. This is
// the one place in native code that knows how; packages/sparse-core/src/block-entry.ts is the one in TypeScript.
//
//   bit 31 clear: a dense block; the entry is its number. A table of dense blocks needs no decoding.
//   bit 31 set: bits 28 to 31 are the kind, and bits 0 to 27 the number.
#pragma once

#include <cstdint>

namespace kv {

// The upper four bits of an entry that names no dense block. 9 to 14 are free for kinds to come. An entry of -1 is of the
// kind `none`.
enum class BlockKind : uint32_t { sparse_24 = 8, none = 15 };

constexpr int kBlockNumberBits = 28;

constexpr int32_t block_entry(BlockKind kind, int32_t number) {
  return static_cast<int32_t>(static_cast<uint32_t>(kind) << kBlockNumberBits | static_cast<uint32_t>(number));
}

constexpr bool is_dense(int32_t entry) { return entry >= 0; }

// The number of a block that is not dense.
constexpr int32_t block_number(int32_t entry) { return entry & ((1 << kBlockNumberBits) - 1); }

// Whether an entry names one of the first `count` dense blocks.
constexpr bool names_dense(int32_t entry, int32_t count) { return is_dense(entry) && entry < count; }

// Whether an entry names one of the first `count` blocks of another kind.
constexpr bool names_block(int32_t entry, BlockKind kind, int32_t count) {
  return static_cast<uint32_t>(entry) >> kBlockNumberBits == static_cast<uint32_t>(kind) && block_number(entry) < count;
}

}  // namespace kv
