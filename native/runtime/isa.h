// The instruction sets that CPU kernels are built for.
#pragma once

namespace kv {

enum class Isa { baseline, avx2, avx512 };

// The widest instruction set that this processor runs.
Isa best_isa();
const char* isa_name(Isa isa);

}  // namespace kv
