// Launches that overlap the end of the kernel before them (sm_90; elsewhere these do nothing).
#pragma once

namespace kv::ptx {

// Lets the next kernel of the stream start where there is room, if it was launched to do so.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the kernels before this one are complete and what they wrote is visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a kernel that can do nothing ahead of its turn.
__device__ inline void follow_previous_kernel() {
  let_next_kernel_start();
  wait_for_previous_kernel();
}

}  // namespace kv::ptx
