#include "kernels/decode-attention/decode-attention.h"

#include "tests/attention-checks.h"

namespace kv {

TEST("decode-attention agrees with the oracle") {
  check_random_cases(decode_attention, {0, 1, 1, 1, 3}, {-1, 0, 1, 254, 255, 256, 700});
  on_every_isa([](Isa isa) { check_shifted_scores(decode_attention, isa, 1); });
}

TEST("decode-attention does not depend on threads, neighbours or blocks") {
  on_every_isa([](Isa isa) {
    check_independent_of_threads_and_neighbours(decode_attention, isa, 3);
    check_blocks_equal_contiguous(decode_attention, isa);
  });
}

TEST("decode-attention shows a NaN in the rows that see it, and in no other") {
  on_every_isa([](Isa isa) { check_nan_shows_where_it_is_seen(decode_attention, isa, 3, 1); });
}

TEST("decode-attention refuses contradictions") { check_refusals(decode_attention); }

}  // namespace kv
