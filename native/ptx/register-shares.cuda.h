// Moves registers between the warpgroups of a block that play different roles (sm_90a).
#pragma once

namespace kv::ptx {

// Every warp of a warpgroup executes the same one.
template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kv::ptx
