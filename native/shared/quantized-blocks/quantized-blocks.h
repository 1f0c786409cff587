// Quantized blocks of keys and values: integer codes of 8, 4, 3 or 2 bits, and a scale for each 32 of them.
//
// A block is 64 consecutive tokens of one kv head, of keys or of values, and all its tokens count. A pool of blocks is
// u8 [quantized_block, byte]. First in a block are the codes, [token][dim], then the scales, [token][group]. A group is
// 32 dims, and two neighbouring ones are a pair. Codes fill up the last group of a row, with 3 or 2 bits the last pair, and
// dims that are not there count as 0.
//   8 bits: byte d of a row is the code of dim d, as a signed number.
//   4 bits: a group has 16 bytes. The low nibble of byte j is the code of dim j of the group, the high one that of
//     dim j + 16.
//   2 bits: a pair has 16 bytes. Bits 2 * i and 2 * i + 1 of byte j are the code of dim j + 16 * i of the pair.
//   3 bits: the lower two bits of all codes lie as codes of 2 bits do. Behind those of all tokens follow the upper bits,
//     [token][pair], 8 bytes a pair: bit 4 * h + i of byte j is that of dim j + 8 * h + 16 * i.
//
// What is quantized is the rotated row y = H (s * x) / sqrt(n), of keys and values alike. H is the Walsh-Hadamard matrix
// of n dims in natural order, applied to each run of n dims. n is the largest power of two that divides the head, and
// s(d) is 1 or -1. The rotation spreads the few large dims of keys, so that a group needs no large steps for them.
// Since H H = n, scores need no rotation back: q . k = q' . k', with q rotated likewise. Values are rotated back by
// x = s * (H y) / sqrt(n). Blocks may also be plain: y = x then, and readers must be told.
//
// Step and codes of a group whose largest magnitude is m:
//   8 bits: step = scale(m / 127), code = clamp(rint(y / step), -127, 127), ties to even, y ~ code * step
//   4 bits: step = scale(m / 8),   code = clamp(floor(y / step + 8), 0, 15),              y ~ (code - 7.5) * step
//   3 bits: step = scale(m / 4),   code = clamp(floor(y / step + 4), 0, 7),               y ~ (code - 3.5) * step
//   2 bits: step = scale(m / 2.5), code = clamp(floor(y / step + 2), 0, 3),               y ~ (code - 1.5) * step
// With 2 bits the largest magnitudes are cut, because all others gain more from smaller steps.
// scale(x) is the smallest scale that is not below x, or the largest scale. It is 0 if all are zero, and NaN if not all
// are finite; the codes are those of 0 then.
//
// All of it is f32, each operation rounded correctly, and nothing is multiplied and added in one step. So every device
// and instruction set makes the same bytes.
#pragma once

#include <cstdint>

#include "runtime/status.h"

namespace kv {

constexpr int kQuantizedBlockTokens = 64;
constexpr int kQuantizedGroupDims = 32;
constexpr int kMostQuantizedDims = 512;

constexpr int quantized_groups(int head_dim) { return (head_dim + kQuantizedGroupDims - 1) / kQuantizedGroupDims; }
constexpr int quantized_pairs(int head_dim) { return (quantized_groups(head_dim) + 1) / 2; }

// Bytes of the codes of one token; of 3 bits, of their lower two.
constexpr int code_row_bytes(int head_dim, int bits) {
  return bits < 4 ? quantized_pairs(head_dim) * 16 : quantized_groups(head_dim) * kQuantizedGroupDims * bits / 8;
}

// Bytes of the upper bits of one token's codes of 3 bits, and where in a block those of all begin.
constexpr int upper_row_bytes(int head_dim, int bits) { return bits == 3 ? quantized_pairs(head_dim) * 8 : 0; }
constexpr int64_t upper_offset(int head_dim, int bits) {
  return int64_t{kQuantizedBlockTokens} * code_row_bytes(head_dim, bits);
}

// Where the scales of a block begin.
constexpr int64_t scale_offset(int head_dim, int bits) {
  return upper_offset(head_dim, bits) + int64_t{kQuantizedBlockTokens} * upper_row_bytes(head_dim, bits);
}

constexpr int64_t quantized_block_bytes(int head_dim, int bits) {
  return scale_offset(head_dim, bits) + kQuantizedBlockTokens * quantized_groups(head_dim);
}

// ---- Rotation. ----

// n, the dims of a run.
constexpr int rotation_run(int head_dim) { return head_dim & -head_dim; }

// 1 / sqrt(run).
constexpr float rotation_factor(int run) {
  float factor = 1.0f;
  for (; run >= 4; run /= 4) factor *= 0.5f;
  return run == 2 ? factor * 0.707106781f : factor;
}

// Whether s(dim) is -1: a bit of a hash, so that the signs have no order that rows could have too.
constexpr bool rotation_negates(int dim) {
  uint32_t hash = (static_cast<uint32_t>(dim) + 1) * 0x9e3779b1u;
  hash = (hash ^ hash >> 15) * 0x85ebca6bu;
  hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
  return (hash ^ hash >> 16) & 1u;
}

// ---- Codes and scales. ----

// How many steps the largest magnitude of a group has.
constexpr float largest_steps(int bits) { return bits == 8 ? 127.0f : bits == 4 ? 8.0f : bits == 3 ? 4.0f : 2.5f; }

// How many codes of 4, 3 or 2 bits stand for negative numbers: the first of the others is the code of 0.
constexpr int negative_codes(int bits) { return 1 << (bits - 1); }

// What a code is less than its number of steps: 0 lies there among the codes.
constexpr float middle_code(int bits) { return bits == 8 ? 0.0f : static_cast<float>(negative_codes(bits)) - 0.5f; }

// A scale is a byte: the upper half of an f16 number without its sign, 5 bits of exponent and 3 of mantissa. It is
// worth 1/16 of that number, so that scales are 0 and 2^-21 to 3840.
constexpr uint8_t kLargestScale = 0xf7;
constexpr uint8_t kNanScale = 0xff;

// scale(x), of x >= 0 as the bits of an f32 number.
constexpr uint8_t scale_code(uint32_t bits) {
  constexpr uint32_t normal = 127 - 18;  // the exponent of the smallest scale that has three bits of mantissa
  const uint32_t exponent = bits >> 23 & 255;  // NaN may have a sign
  if (exponent == 255) return kNanScale;
  if (exponent >= normal) {
    const uint32_t code = ((bits + 0xfffffu) >> 20) - 8 * (normal - 1);
    return static_cast<uint8_t>(code < kLargestScale ? code : kLargestScale);
  }
  // Steps of 2^-21, rounded up.
  const uint32_t shift = normal + 20 - exponent;
  if (shift > 24) return bits != 0;
  const uint32_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  return static_cast<uint8_t>((mantissa + (1u << shift) - 1) >> shift);
}

// Refuses codes of other than 8, 4, 3 or 2 bits, and heads of more than 512 dims (capability).
Status validate_quantized_format(int32_t head_dim, int32_t bits);

}  // namespace kv
