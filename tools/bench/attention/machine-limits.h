// What the machine can do at most, measured: the lines that kernels are held against.
#pragma once

#include "runtime/workers.h"

namespace bench {

// Floating-point operations a second of independent fused multiply-adds on f32 vectors, all workers together.
double peak_flops(kv::Workers& workers);

// Bytes a second of reading, all workers together; `data` should be several times the last-level cache.
double read_bandwidth(kv::Workers& workers, const void* data, size_t bytes);

double seconds_now();

}  // namespace bench
