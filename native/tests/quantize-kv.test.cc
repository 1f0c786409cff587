#include "kernels/quantize-kv/quantize-kv.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "kernels/dequantize-kv/dequantize-kv.h"
#include "shared/quantized-blocks/quantized-blocks.h"
#include "tests/check.h"
#include "tests/quantized-case.h"

namespace kv {
namespace {

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float worth_of(int code) { return elements::half_to_float(static_cast<uint16_t>(code << 7)) / 16; }

TEST("a scale is the smallest that is not below the step") {
  // All exponents, and mantissas that are just above and below those of a scale.
  for (uint32_t high = 0; high < 0x800; ++high) {
    for (const uint32_t low : {0x00000u, 0x00001u, 0x7ffffu, 0x80000u, 0xfffffu}) {
      const uint32_t bits = high << 20 | low;
      const float step = float_of(bits);
      const int code = scale_code(bits);
      if (!(step < std::numeric_limits<float>::infinity())) {
        CHECK(code == kNanScale);
      } else {
        CHECK(code <= kLargestScale);
        CHECK(code == kLargestScale || worth_of(code) >= step);
        CHECK(code == 0 || worth_of(code - 1) < step);
      }
    }
  }
  CHECK(std::isnan(worth_of(kNanScale)));
  CHECK(worth_of(kLargestScale) == 3840);
}

TEST("quantize-kv and dequantize-kv give the same bytes on every instruction set and with any number of threads") {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    const QuantizedCase wanted = QuantizedCase::random(random);
    QuantizedCase reference = wanted;
    CHECK(reference.run_on_cpu(Isa::baseline, 1));
    on_every_isa([&](Isa isa) {
      QuantizedCase given = wanted;
      CHECK(given.run_on_cpu(isa, 3));
      CHECK(given.quantizes_like(reference));
      CHECK(given.restores_like(reference));
    });
  }
}

TEST("quantize-kv and dequantize-kv refuse formats that there are not") {
  Workers workers(1);
  ExecutionContext context{workers, best_isa()};
  for (const auto& [head_dim, key_bits, value_bits] :
       {std::tuple{0, 8, 8}, std::tuple{513, 8, 8}, std::tuple{64, 5, 8}, std::tuple{64, 1, 8}, std::tuple{64, 8, 16}}) {
    const uint8_t byte = 0;
    QuantizeKvArguments there;
    there.values = &byte;
    there.head_dim = head_dim;
    there.key_bits = key_bits;
    there.value_bits = value_bits;
    CHECK(quantize_kv(there, context).code == StatusCode::capability);
    uint8_t written = 0;
    DequantizeKvArguments back;
    back.values = &written;
    back.head_dim = head_dim;
    back.key_bits = key_bits;
    back.value_bits = value_bits;
    CHECK(dequantize_kv(back, context).code == StatusCode::capability);
  }
}

}  // namespace
}  // namespace kv
