// Tiles of 16-bit rows in shared memory, as TMA writes them and wgmma reads them. A tile consists of panels of 64
// columns, in which a row is 128 swizzled bytes. A tile begins at a multiple of 1024 bytes. Device code.
#pragma once

#include <cstdint>

#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"

namespace kv::sm90a {

constexpr int kWarpgroupRows = 64;  // rows of one wgmma
constexpr int kPanelColumns = 64;   // 16-bit elements in a swizzled row
constexpr int kPanelBytes = 128;    // bytes of such a row

template <typename Element, int kRows, int kDim>
using PanelTile = Element[kDim / kPanelColumns][kRows][kPanelColumns];

// One thread starts the copy of a box of the pool to rows of the tile. The box begins at `token` of `block`, the rows
// at `row`. The bytes count on `barrier`.
template <typename Element, int kPanels, int kRows>
__device__ void copy_box(Element (&tile)[kPanels][kRows][kPanelColumns], int row, const CUtensorMap* pool, int token,
                         int block, uint64_t* barrier) {
  for (int panel = 0; panel < kPanels; ++panel) {
    ptx::tensor_copy(tile[panel][row], pool, panel * kPanelColumns, token, block, barrier);
  }
}

// A warp clears the rows `begin` .. `end` - 1. fence_async_proxy must follow before wgmma reads them.
template <typename Element, int kPanels, int kRows>
__device__ void clear_rows(Element (&tile)[kPanels][kRows][kPanelColumns], int begin, int end) {
  for (int panel = 0; panel < kPanels; ++panel) {
    uint4* rows = reinterpret_cast<uint4*>(tile[panel][begin]);
    for (int i = threadIdx.x % 32; i < (end - begin) * kPanelBytes / 16; i += 32) rows[i] = make_uint4(0, 0, 0, 0);
  }
}

// The products of 64 rows of `left`, from `row` on, with all rows of `right`, summed over the dims. The operands are
// only addresses, so the object may be made before the rows have landed.
template <typename Element, int kPanels, int kLeftRows, int kRightRows>
class ScoreProducts {
 public:
  __device__ ScoreProducts(const Element (&left)[kPanels][kLeftRows][kPanelColumns], int row,
                           const Element (&right)[kPanels][kRightRows][kPanelColumns])
      : left_(ptx::wgmma_operand(left[0][row])), right_(ptx::wgmma_operand(right)) {}

  // Issues the products as one group of wgmma.
  __device__ void issue(float (&scores)[kRightRows / 2]) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int bytes = 0; bytes < kPanelBytes; bytes += 32) {
        ptx::WgmmaShared<Element, kRightRows>::issue(
            scores, ptx::wgmma_advance(left_, panel * kLeftRows * kPanelBytes + bytes),
            ptx::wgmma_advance(right_, panel * kRightRows * kPanelBytes + bytes), panel + bytes > 0);
      }
    }
    ptx::wgmma_commit();
  }

 private:
  uint64_t left_;
  uint64_t right_;
};

}  // namespace kv::sm90a
