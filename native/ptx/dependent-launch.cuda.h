// Programmatic dependent launch: a kernel starts while the kernel ahead of it ends (sm_90). Does nothing on older
// devices.
#pragma once

namespace kv::ptx {

// Lets the next kernel of the stream start wherever a multiprocessor has room, if that kernel was launched to
// overlap.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the kernels ahead of this one are complete and what they wrote is visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a kernel that cannot do anything before the kernel ahead is complete.
__device__ inline void follow_previous_kernel() {
  let_next_kernel_start();
  wait_for_previous_kernel();
}

}  // namespace kv::ptx
