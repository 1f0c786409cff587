// The instruction sets that CPU kernels are built for.
#pragma once

namespace kv {

// `amx` is avx512 with tile registers, for the kernels that have a use for them; all others are those of avx512.
enum class Isa { baseline, avx2, avx512, amx };

// The widest instruction set that runs here.
Isa best_isa();

// Whether tile registers can be used. `absent`: the processor has none, the system does not save them, or the compiler
// of this build knew none. `refused`: the system does not let this process use them.
enum class AmxState { absent, refused, ready };

// The first call asks the system for the process's permission to use tile registers.
AmxState amx_state();

bool runs(Isa isa);
const char* isa_name(Isa isa);

}  // namespace kv
