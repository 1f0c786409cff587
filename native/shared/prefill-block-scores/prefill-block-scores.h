// What every estimate of block scores takes. The score of a tile of queries and a block of keys is the natural
// logarithm of an estimate: which share of the tile's attention falls on the block. The shares of a tile add up to
// about 1, so that scores compare over blocks, tiles and heads.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-faults.h"
#include "shared/paged/prompt-queries.h"

namespace kv {

constexpr int32_t kScoredTileRows = 128;
constexpr int32_t kScoredBlockKeys = 64;

struct PrefillBlockScoresArguments : PromptQueries {
  // [query_head, tile, block]: minus infinity for a block that no row of the tile sees. NaN where a query or a key is
  // not finite.
  float* scores = nullptr;
  int32_t tiles = 0;   // of 128 rows, the last one perhaps of fewer
  int32_t blocks = 0;  // of 64 keys, the last one perhaps of fewer
};

enum class BlockScoresFault : int32_t {
  // value: the count that was found; row: the kv head, or -1 for the count of rows; limit: tiles or blocks
  other_count = static_cast<int32_t>(PagedFault::operations_own),
};

std::string describe_block_scores_fault(const Fault& fault);

// Refuses sizes and dtypes that contradict each other (invalid_value, capability). Reads no table.
Status validate_sizes(const PrefillBlockScoresArguments& arguments);

// Refuses counts of rows and keys that are not those of the scores' tiles and blocks (invalid_value). The tables must
// be valid, and in memory that the host reads.
Status validate_counts(const PrefillBlockScoresArguments& arguments);

}  // namespace kv
