// Products of many rows with many columns on tensor cores, tile by tile. Elements of a row and a column lie in shared
// memory in slices of 128 bytes, in 16 bits or as f32, which is rounded to tf32. Hopper's own products take 16 bits.
#pragma once

#include <type_traits>

#include "ptx/arithmetic.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/mma.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace prefill_block_scores {

constexpr int kPieceBytes = 16;
constexpr int kPieces = 8;  // of a slice of a row
constexpr int kSliceBytes = kPieces * kPieceBytes;

template <class E>
constexpr int kPieceElements = kPieceBytes / static_cast<int>(sizeof(E));
template <class E>
constexpr int kSliceElements = kPieces * kPieceElements<E>;

// Pieces change places, so that the same piece of eight rows lies in all banks; as SWIZZLE_128B does it.
__device__ inline char* piece_at(char* slices, int row, int piece) {
  return slices + row * kSliceBytes + (piece ^ row % kPieces) * kPieceBytes;
}

// The elements that `element(i)` returns as f32.
template <class E, class Element>
__device__ void store_piece(char* to, Element&& element) {
  alignas(kPieceBytes) E elements[kPieceElements<E>];
#pragma unroll
  for (int i = 0; i < kPieceElements<E>; ++i) elements[i] = from_float<E>(element(i));
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(elements);
}

// A tile of 64 * kGroups rows and 128 columns, for kGroups warpgroups. Each warp has 16 rows.
template <class Element, int kGroups>
struct TileProducts {
  using E = Element;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kColumns = 128;
  static constexpr int kThreads = 128 * kGroups;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr bool kIsAsync = sizeof(E) == 2;
#else
  static constexpr bool kIsAsync = false;
#endif

  // [8 columns, 4]: row_of(0) and column_of(n, 0), column_of(n, 1), then the same of row_of(1).
  float sums[kColumns / 2];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int place() { return lane() / 4; }
  __device__ static int pair() { return lane() % 4; }
  __device__ static int row_of(int half) { return warp() * 16 + half * 8 + place(); }
  __device__ static int column_of(int n, int odd) { return n * 8 + 2 * pair() + odd; }
  __device__ float sum(int half, int n, int odd) const { return sums[n * 4 + half * 2 + odd]; }

  // start(n, odd) is what the sums of a column begin with.
  template <class Start>
  __device__ void begin(Start&& start) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      sums[n * 4] = sums[n * 4 + 2] = start(n, 0);
      sums[n * 4 + 1] = sums[n * 4 + 3] = start(n, 1);
    }
  }

  // Begins to add the products of a slice of all rows and columns. Both start at multiples of 1,024 bytes.
  __device__ void start_adding(const char* rows, const char* columns) {
    if constexpr (kIsAsync) {
      const uint64_t left = ptx::wgmma_operand(rows + warp() / 4 * 64 * kSliceBytes);
      const uint64_t right = ptx::wgmma_operand(columns);
      ptx::pin_registers(sums);
      ptx::wgmma_fence();
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += 2) {
        ptx::WgmmaShared<E, kColumns>::issue(sums, ptx::wgmma_advance(left, piece * kPieceBytes),
                                             ptx::wgmma_advance(right, piece * kPieceBytes), true);
      }
      ptx::wgmma_commit();
    } else {
      multiply(rows, columns);
    }
  }

  __device__ void finish_adding() {
    if constexpr (kIsAsync) {
      ptx::wgmma_wait<0>();
      ptx::pin_registers(sums);
    }
  }

 private:
  __device__ void multiply(const char* rows, const char* columns) {
    const int at = lane();
    rows += (warp() * 16 + at % 16) * kSliceBytes;
    columns += (at / 16 * 8 + at % 8) * kSliceBytes;
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += 2) {
      uint32_t left[4];
      load(left, rows + ((piece + at / 16) ^ at % 8) * kPieceBytes);
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        uint32_t right[4];
        load(right, columns + n * 8 * kSliceBytes + ((piece + at / 8 % 2) ^ at % 8) * kPieceBytes);
        multiply(sums + n * 4, left, right[0], right[1]);
        multiply(sums + n * 4 + 4, left, right[2], right[3]);
      }
    }
  }
  __device__ static void load(uint32_t (&fragment)[4], const char* from) {
    ptx::load_matrices(fragment, from);
    if constexpr (std::is_same_v<E, float>) {
      for (uint32_t& element : fragment) element = ptx::rounded_to_tf32(element);
    }
  }
  __device__ static void multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<E, float>) ptx::mma_m16n8k8(d, a, b0, b1);
    else ptx::mma_m16n8k16<E>(d, a, b0, b1);
  }
};

// How much shared memory slices take.
struct SliceRoom {
  int count;       // slices of a row
  bool rows_stay;  // else their slices come with those of the columns
  int stages;      // 3, or 2 where there is no room for more
};

// Shared memory in which the rows of a thread block meet columns, run by run of 128. Slices come in stages.
template <class Tile>
struct Slices {
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kMostStages = 3;
  static constexpr int kOfRows = Tile::kRows * kSliceBytes;
  static constexpr int kOfColumns = Tile::kColumns * kSliceBytes;

  char* shared;
  SliceRoom room;

  static constexpr int bytes(const SliceRoom& room) {
    return room.rows_stay ? room.count * kOfRows + room.stages * kOfColumns : room.stages * (kOfRows + kOfColumns);
  }

  // load_rows(to, slice) and load_columns(to, run, slice) enqueue copies or write; begin(products, run) and
  // end(products, run) are called around the products of each run. Shared memory must not be in use by other threads.
  template <class LoadRows, class LoadColumns, class Begin, class End>
  __device__ void for_each_run(int runs, LoadRows&& load_rows, LoadColumns&& load_columns, Begin&& begin, End&& end) const {
    char* const stages = room.rows_stay ? shared + room.count * kOfRows : shared;
    const int of_stage = room.rows_stay ? kOfColumns : kOfColumns + kOfRows;
    int run_ahead = 0;
    int slice_ahead = 0;
    int stage_ahead = 0;
    const auto load_ahead = [&] {
      if (run_ahead < runs) {
        char* const to = stages + stage_ahead * of_stage;
        load_columns(to, run_ahead, slice_ahead);
        if (!room.rows_stay) load_rows(to + kOfColumns, slice_ahead);
        stage_ahead = stage_ahead + 1 == room.stages ? 0 : stage_ahead + 1;
        if (++slice_ahead == room.count) {
          slice_ahead = 0;
          ++run_ahead;
        }
      }
      ptx::async_copy_commit();
    };
    if (room.rows_stay) {
      for (int slice = 0; slice < room.count; ++slice) load_rows(shared + slice * kOfRows, slice);
    }
    for (int i = 0; i < room.stages - 1; ++i) load_ahead();
    int stage = 0;
    Tile products;
    for (int run = 0; run < runs; ++run) {
      for (int slice = 0; slice < room.count; ++slice) {
        if (room.stages == kMostStages) ptx::async_copy_wait<kMostStages - 2>();
        else ptx::async_copy_wait<0>();
        if constexpr (Tile::kIsAsync) ptx::fence_async_proxy();
        __syncthreads();
        if (slice == 0) begin(products, run);
        const char* const columns = stages + stage * of_stage;
        products.start_adding(room.rows_stay ? shared + slice * kOfRows : columns + kOfColumns, columns);
        load_ahead();
        products.finish_adding();
        stage = stage + 1 == room.stages ? 0 : stage + 1;
      }
      end(products, run);
    }
  }
};

}  // namespace prefill_block_scores
}  // namespace kv
