// Moves registers between warpgroups of a thread block that have different roles (sm_90a).
#pragma once

namespace kv::ptx {

// All warps of a warpgroup must execute the same instruction.
template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kv::ptx
