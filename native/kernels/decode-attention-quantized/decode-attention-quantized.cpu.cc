#include "kernels/decode-attention-quantized/decode-attention-quantized.h"

#include "shared/attention/decode/key-splits.cpu.h"
#include "shared/quantized-blocks/quantized-blocks.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Bytes in each lane. Left to the compiler, each would be converted by itself.
inline VecInt load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecInt>(
      _mm512_maskz_cvtepu8_epi32(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<VecInt>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return VecInt{p[0], p[1], p[2], p[3]};
#endif
}

// The same of signed bytes.
inline VecInt load_signed_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecInt>(
      _mm512_maskz_cvtepi8_epi32(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<VecInt>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return load_bytes(p) << 24 >> 24;
#endif
}

// Codes as numbers: what is stored over the step of their group. `dim` is a multiple of kLanes.
template <int kBits>
Vec load_codes(const uint8_t* row, int dim) {
  if constexpr (kBits == 8) {
    return __builtin_convertvector(load_signed_bytes(row + dim), Vec);
  } else {
    const VecInt both = load_bytes(row + dim / 32 * 16 + dim % 16);
    return __builtin_convertvector(dim % 32 < 16 ? both & 15 : both >> 4, Vec) - kMiddleCode4;
  }
}

// Bytes of scales as numbers. The exponent and the fraction move to the places of an f32 number's; the factor moves the
// exponent, that of numbers without a leading one too.
inline Vec load_scales(const uint8_t* p) {
  const VecInt bytes = load_bytes(p);
  const Vec numbers = reinterpret_cast<Vec>(bytes << 20) * 0x1p108f;
  const VecInt nan = bytes == kNanScale;
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(numbers) | (nan & 0x7fc00000));
}

// A block of keys, or of values, and the block that will be read after it.
template <int kBits>
struct QuantizedBlock {
  const uint8_t* codes;
  const float* scales;  // [token, group]
  const uint8_t* next;
  int groups;
  int count = kQuantizedBlockTokens;

  int row_bytes() const { return groups * kQuantizedGroupDims * kBits / 8; }
  Vec at(int token, int d) const {
    return load_codes<kBits>(codes + token * row_bytes(), d) * scales[token * groups + d / kQuantizedGroupDims];
  }
  void fetch_next(int token, int first, int elements) const {
    const uint8_t* from = next + token * row_bytes() + first * kBits / 8;
    for (int byte = 0; byte < elements * kBits / 8; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  }
};

// Keys of kBits each, or values.
template <int kBits>
class Pool {
 public:
  Pool(const void* pool, int head_dim)
      : pool_(static_cast<const uint8_t*>(pool)), head_dim_(head_dim), groups_(quantized_groups(head_dim)) {}

  const uint8_t* block(int32_t number) const { return pool_ + number * quantized_block_bytes(head_dim_, kBits); }

  // Writes the block's scales as numbers to `scales`.
  QuantizedBlock<kBits> open(int32_t number, const uint8_t* next, float* scales) const {
    const uint8_t* codes = block(number);
    const uint8_t* bytes = codes + scale_offset(head_dim_, kBits);
    for (int i = 0; i < kQuantizedBlockTokens * groups_; i += kLanes) store(scales + i, load_scales(bytes + i));
    return {codes, scales, next, groups_};
  }

 private:
  const uint8_t* pool_;
  int head_dim_;
  int groups_;
};

template <int kKeyBits, int kValueBits>
class QuantizedCache {
 public:
  static constexpr bool rotated = true;
  static int dim_of(int head_dim) { return quantized_groups(head_dim) * kQuantizedGroupDims; }
  static void rotate(float* row, int head_dim) { KV_ISA::rotate(row, head_dim); }
  static void rotate_back(float* row, int head_dim) { KV_ISA::rotate_back(row, head_dim); }

  explicit QuantizedCache(const QuantizedAttentionArguments& a)
      : merges(a.merge), keys_(a.keys, a.head_dim), values_(a.values, a.head_dim) {}

  const bool merges;

  int64_t work_floats(int64_t, int dim) const { return kQuantizedBlockTokens * dim / kQuantizedGroupDims; }

  void score(const RowRange& range, const SplitKeys& keys, const float* queries, int dim, float* scores,
             float* work) const {
    const uint8_t* values = values_.block(block_of(range, keys.first));
    for_each_block(keys, [&](int32_t first, bool last) {
      const uint8_t* next = last ? values : keys_.block(block_of(range, first + kQuantizedBlockTokens));
      const auto block = keys_.open(block_of(range, first), next, work);
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        score_run<decltype(group)::count>(queries + row * dim, block, dim,
                                          scores + row * kScoreStride + (first - keys.first), kScoreStride);
      });
    });
  }

  void add_values(const RowRange& range, const SplitKeys& keys, const float* weights, int dim, float* output,
                  float* work) const {
    const uint8_t* next_keys = keys_.block(block_of(range, keys.next));
    for_each_block(keys, [&](int32_t first, bool last) {
      const uint8_t* next = last ? next_keys : values_.block(block_of(range, first + kQuantizedBlockTokens));
      const auto block = values_.open(block_of(range, first), next, work);
      for_each_row_group(range.rows(), [&](int64_t row, auto group) {
        KV_ISA::add_values<decltype(group)::count>(weights + row * kScoreStride + (first - keys.first), kScoreStride,
                                                   block, dim, output + row * dim);
      });
    });
  }

 private:
  static int32_t block_of(const RowRange& range, int32_t key) { return range.blocks[key / kQuantizedBlockTokens]; }

  // Calls body(first key, whether this is the split's last block).
  template <class Body>
  static void for_each_block(const SplitKeys& keys, Body&& body) {
    for (int32_t first = keys.first; first < keys.end; first += kQuantizedBlockTokens) {
      body(first, first + kQuantizedBlockTokens >= keys.end);
    }
  }

  Pool<kKeyBits> keys_;
  Pool<kValueBits> values_;
};

template <int kKeyBits>
void decode_for_values(const QuantizedAttentionArguments& a, Workers& workers) {
  if (a.value_bits == 8) return decode_splits(a, QuantizedCache<kKeyBits, 8>(a), workers);
  decode_splits(a, QuantizedCache<kKeyBits, 4>(a), workers);
}

}  // namespace

void decode_attention_quantized(const QuantizedAttentionArguments& a, Workers& workers) {
  if (a.key_bits == 8) return decode_for_values<8>(a, workers);
  decode_for_values<4>(a, workers);
}

}  // namespace KV_ISA
}  // namespace kv
