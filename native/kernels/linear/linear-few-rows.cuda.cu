// The linear layer of few rows, bound by the bandwidth of reading each weight once.
//
// A block has a run of neighbouring outputs, and its warps share the input features. Each warp copies its slices of
// the weights to shared memory, one slice ahead of the tensor-core products and past the ends of outputs, so that
// the memory stays busy while the warps' sums are added.
#include "kernels/linear/linear-few-rows.cuda.h"

#include <algorithm>

#include "kernels/linear/linear-few-rows-product.cuda.h"
#include "kernels/linear/linear-output.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarp * kWarps;
constexpr int kGroupTiles = 2;  // whose sums a warp keeps at once
constexpr int kGroupOuts = kGroupTiles * kTileOuts;
constexpr int kShareOuts = 8;   // blocks' shares are multiples of this
constexpr int kSliceLines = 4;  // of features that a warp takes at a time
constexpr int kSliceFeatures = kSliceLines * kLineFeatures;
constexpr int kSliceChunks = kSliceFeatures / kLaneFeatures;  // of 16 bytes, of one output
constexpr int kBlockFeatures = kWarps * kSliceFeatures;
constexpr int kTileChunks = kTileOuts * kSliceChunks;

using GroupWeights = uint4[kGroupTiles][kTileChunks];

// What a warp's sums are left in for the block: those of `kRows` rows.
template <int kRows>
using GroupSums = float[kWarps][kRows][kGroupOuts];

template <int kRows>
struct SharedStorage {
  GroupWeights weights[kWarps];
  GroupSums<kRows> sums[2];
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

__host__ __device__ inline int64_t shares_of(const LinearArguments& layer) {
  return (layer.out_features + kShareOuts - 1) / kShareOuts;
}

// Neighbouring outputs of one layer, or, if `kGated`, of the gate and of the layer that it gates. Blocks divide the
// outputs of all layers evenly, and go through their part group by group.
template <bool kGated>
class Group {
 public:
  static constexpr int kMostOuts = kGated ? kTileOuts : kGroupOuts;  // of each layer

  __device__ explicit Group(const LinearLayers& layers) : layers_(layers) {
    int64_t shares = 0;
    for (int i = 0; i < layers.divided(); ++i) shares += shares_of(layers.layers[i]);
    int64_t begin = shares * blockIdx.x / gridDim.x;
    shares_left_ = static_cast<int>(shares * (blockIdx.x + 1) / gridDim.x - begin);
    for (; begin >= shares_of(layer()); ++layer_) begin -= shares_of(layer());
    first_out_ = begin * kShareOuts;
    outs_ = count_outs();
  }

  __device__ const LinearArguments& layer() const { return layers_.layers[layer_]; }
  __device__ const LinearArguments& gated_layer() const { return layers_.layers[1]; }
  __device__ int64_t first_out() const { return first_out_; }
  __device__ int outs() const { return outs_; }  // 0 after the last group

  __device__ void advance() {
    shares_left_ -= (outs_ + kShareOuts - 1) / kShareOuts;
    first_out_ += outs_;
    if (first_out_ == layer().out_features && shares_left_ > 0) {
      ++layer_;
      first_out_ = 0;
    }
    outs_ = count_outs();
  }

 private:
  __device__ int count_outs() const {
    const int most = min(kMostOuts, shares_left_ * kShareOuts);
    return static_cast<int>(min(int64_t{most}, layer().out_features - first_out_));
  }

  const LinearLayers& layers_;
  int layer_ = 0;
  int shares_left_;  // of the block
  int64_t first_out_;
  int outs_;
};

// Where the 16-byte chunk of an output's slice lies in its tile: those of odd outputs change places, so that the two
// outputs that eight lanes read at once lie in different banks.
__device__ inline int place(int out, int chunk) { return out * kSliceChunks + (chunk ^ (out % 2 * 4)); }

// Copies a warp's weights to shared memory, slice by slice of each group.
template <class W, bool kGated>
class WeightStream {
 public:
  __device__ WeightStream(const Group<kGated>& group, int features, GroupWeights& weights)
      : to_(&weights[0][place(first_out(), chunk())]), group_(group), features_(features) {
    if (feature_ < features_) start_group();
  }

  // Copies a tile of the slice, after those before it.
  __device__ void request(int tile) {
    const int outs_left = kGated ? outs_left_ : outs_left_ - tile * kTileOuts;
    if (kGated && tile > 0) from_ = slice_ + to_gated_;
#pragma unroll
    for (int out = 0; out < kTileOuts; out += kOutsAtOnce) {
      // Absent features are zeros; absent outputs may be anything.
      if (out < outs_left) {
        ptx::async_copy_16(to_ + tile * kTileChunks + out * kSliceChunks, from_, present_, policy_);
      }
      from_ += step_;
    }
    ptx::async_copy_commit();
  }

  // Goes on to the next slice; after the last there is nothing to copy.
  __device__ void advance() {
    feature_ += kBlockFeatures;
    slice_ += kBlockFeatures;
    if (feature_ < features_) {
      start_slice();
    } else if (group_.outs() > 0) {
      group_.advance();
      start_group();
    }
  }

 private:
  static constexpr int kOutsAtOnce = kWarp / kSliceChunks;

  __device__ static int first_out() { return lane() / kSliceChunks; }
  __device__ static int chunk() { return lane() % kSliceChunks; }

  __device__ void start_group() {
    const LinearArguments& layer = group_.layer();
    feature_ = warp() * kSliceFeatures;
    step_ = kOutsAtOnce * layer.weight_stride;
    slice_ = static_cast<const W*>(layer.weight) + (group_.first_out() + first_out()) * layer.weight_stride +
             feature_ + chunk() * kLaneFeatures;
    if constexpr (kGated) to_gated_ = static_cast<const W*>(group_.gated_layer().weight) - static_cast<const W*>(layer.weight);
    start_slice();
  }

  __device__ void start_slice() {
    from_ = slice_;
    outs_left_ = group_.outs() - first_out();
    present_ = feature_ + chunk() * kLaneFeatures < features_;
  }

  uint4* const to_;
  Group<kGated> group_;
  const int features_;
  const uint64_t policy_ = ptx::evict_first_policy();
  int feature_ = warp() * kSliceFeatures;
  int64_t step_ = 0;
  int64_t to_gated_ = 0;  // from the gate's weights to those of the layer that it gates
  const W* slice_ = nullptr;  // this lane's first chunk of the slice
  const W* from_ = nullptr;   // and the next to copy
  int outs_left_ = 0;
  bool present_ = false;
};

// A lane's input of a slice.
template <class T>
struct SliceInput {
  LaneFeatures<T> lines[kSliceLines];

  __device__ void read(const T* features, int features_left) {
#pragma unroll
    for (int line = 0; line < kSliceLines; ++line) {
      lines[line] = {};
      if (line * kLineFeatures < features_left) {
        lines[line] = *reinterpret_cast<const LaneFeatures<T>*>(features + line * kLineFeatures);
      }
    }
  }
};

// A lane's weights of a tile's slice: of the outputs lane / 4 and lane / 4 + 8.
template <class W>
struct TileWeights {
  LaneFeatures<W> lines[kSliceLines][2];

  __device__ void read(const uint4 (&tile)[kTileChunks]) {
#pragma unroll
    for (int line = 0; line < kSliceLines; ++line) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int out = lane() / 4 + 8 * half;
        lines[line][half] = reinterpret_cast<const LaneFeatures<W>&>(tile[place(out, line * 4 + lane() % 4)]);
      }
    }
  }
};

// The outputs of a group that a thread finishes.
template <class T, int kRows, bool kGated>
class Finish {
 public:
  // Reads what the outputs add to their sums, so that nothing waits for it at the end.
  __device__ void read(const Group<kGated>& group, int64_t first_row) {
    each(group, first_row, [&](int i, int row, int out) {
      if constexpr (!kGated) before_[i] = before_sum<T>(group.layer(), first_row + row, group.first_out() + out);
    });
  }

  // Adds the warps' sums, always in the same order, and writes the outputs.
  __device__ void write(const Group<kGated>& group, int64_t first_row,
                        const float (&products)[kRows / kOperandRows][kGroupTiles][4], GroupSums<kRows>& sums) const {
#pragma unroll
    for (int rows = 0; rows < kRows / kOperandRows; ++rows) {
#pragma unroll
      for (int tile = 0; tile < kGroupTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[warp()][rows * kOperandRows + lane() % 4 * 2 + i % 2][tile * kTileOuts + i / 2 * 8 + lane() / 4] =
              products[rows][tile][i];
        }
      }
    }
    __syncthreads();
    const auto sum_of = [&](int row, int out) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][row][out];
      return sum;
    };
    each(group, first_row, [&](int i, int row, int out) {
      const int64_t to_row = first_row + row;
      const int64_t to_out = group.first_out() + out;
      if constexpr (kGated) {
        const auto with_bias = [to_out](const LinearArguments& a, float sum) {
          return a.bias != nullptr ? sum + bias_of(a, to_out) : sum;
        };
        const LinearArguments& gate = group.layer();
        static_cast<T*>(gate.output)[to_row * gate.output_stride + to_out] = gated_of<T>(
            with_bias(gate, sum_of(row, out)), with_bias(group.gated_layer(), sum_of(row, kTileOuts + out)));
      } else {
        write_sum<T>(group.layer(), to_row, to_out, sum_of(row, out), before_[i]);
      }
    });
  }

 private:
  static constexpr int kOuts = Group<kGated>::kMostOuts;
  static constexpr int kMost = (kRows * kOuts + kThreads - 1) / kThreads;  // of a thread

  // Calls visit(i, row, out) for each of the thread's outputs that there are.
  template <class Visit>
  __device__ static void each(const Group<kGated>& group, int64_t first_row, Visit visit) {
    const auto rows = min(int64_t{kRows}, group.layer().tokens - first_row);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at / kOuts < rows && at % kOuts < group.outs()) visit(i, at / kOuts, at % kOuts);
    }
  }

  float before_[kMost] = {};
};

// The first weights that a block reads come to L2, which need not wait even while they are written.
template <class W, bool kGated>
__device__ void prefetch(const Group<kGated>& group) {
  const int out = static_cast<int>(threadIdx.x);
  if (out >= group.outs()) return;
  const auto prefetch_of = [&](const LinearArguments& layer) {
    const int64_t features = min(int64_t{kBlockFeatures}, layer.in_features);
    ptx::prefetch(static_cast<const W*>(layer.weight) + (group.first_out() + out) * layer.weight_stride,
                  static_cast<uint32_t>(features * sizeof(W)));
  };
  prefetch_of(group.layer());
  if constexpr (kGated) prefetch_of(group.gated_layer());
}

template <class T, class W, int kRows, bool kGated>
__global__ void __launch_bounds__(kThreads)
    multiply_few_rows(const __grid_constant__ LinearLayers layers, int64_t first_row, bool weights_at_rest) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<kRows>*>(shared_memory);
  GroupWeights& weights = shared.weights[warp()];
  Group<kGated> group(layers);
  ptx::let_next_kernel_start();
  const LinearArguments& a = layers.layers[0];  // its input is that of all
  const int features = static_cast<int>(a.in_features);
  if (!weights_at_rest) {
    prefetch<W>(group);  // all that is safe
    ptx::wait_for_previous_kernel();
  }
  WeightStream<W, kGated> stream(group, features, weights);
  for (int tile = 0; tile < kGroupTiles; ++tile) stream.request(tile);
  if (weights_at_rest) ptx::wait_for_previous_kernel();
  const int first_slice = warp() * kSliceFeatures;
  constexpr int kOperands = kRows / kOperandRows;
  const int first_feature = lane() % 4 * kLaneFeatures;
  const int64_t row = first_row + lane() / 4;
  const T* input = static_cast<const T*>(a.input) + row * a.input_stride + first_feature;
  SliceInput<T> upcoming[kOperands];
  const auto read = [&](int slice) {
#pragma unroll
    for (int rows = 0; rows < kOperands; ++rows) {
      const int input_features = row + rows * kOperandRows < a.tokens ? features - first_feature : 0;
      upcoming[rows].read(input + rows * kOperandRows * a.input_stride + slice, input_features - slice);
    }
  };
  read(first_slice);
  for (int buffer = 0; group.outs() > 0; group.advance(), buffer ^= 1) {
    float products[kOperands][kGroupTiles][4] = {};
    Finish<T, kRows, kGated> outputs;
    outputs.read(group, first_row);
    for (int slice = first_slice; slice < features;) {
      Operand<T, W> operands[kOperands][kSliceLines];
#pragma unroll
      for (int rows = 0; rows < kOperands; ++rows) {
#pragma unroll
        for (int line = 0; line < kSliceLines; ++line) operands[rows][line].set(upcoming[rows].lines[line]);
      }
      slice += kBlockFeatures;
      read(slice < features ? slice : first_slice);
      stream.advance();
#pragma unroll
      for (int tile = 0; tile < kGroupTiles; ++tile) {
        ptx::async_copy_wait<kGroupTiles - 1>();
        __syncwarp();
        TileWeights<W> tile_weights;
        tile_weights.read(weights[tile]);
        __syncwarp();  // every lane is done with the tile that the request overwrites
        stream.request(tile);
#pragma unroll
        for (int line = 0; line < kSliceLines; ++line) {
#pragma unroll
          for (int rows = 0; rows < kOperands; ++rows) {
            operands[rows][line].multiply(tile_weights.lines[line], products[rows][tile]);
          }
        }
      }
    }
    outputs.write(group, first_row, products, shared.sums[buffer]);
  }
}

struct Multiprocessors {
  int count = 0;
  int shared_bytes = 0;  // of each
};

Status find_multiprocessors(Multiprocessors& found) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&found.count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  return cuda_status(error);
}

template <class T, class W, int kRows, bool kGated>
Status launch(const LinearLayers& layers, int64_t first_row, unsigned blocks, const Multiprocessors& multiprocessors,
              cudaStream_t stream) {
  const auto kernel = multiply_few_rows<T, W, kRows, kGated>;
  // With half of a multiprocessor's shared memory, no two blocks of a launch that overlaps another share one.
  const int shared_bytes = std::max(static_cast<int>(sizeof(SharedStorage<kRows>)), multiprocessors.shared_bytes / 2);
  const Status allowed =
      cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  if (!allowed.ok()) return allowed;
  return launch_overlapped(kernel, blocks, kThreads, static_cast<size_t>(shared_bytes), stream, layers, first_row,
                           layers.weights_at_rest());
}

}  // namespace

bool fits_few_rows(const LinearArguments& a) {
  const auto aligned = [](const void* data, int64_t stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * static_cast<int64_t>(byte_size(dtype)) % 16 == 0;
  };
  return a.weight_dtype != DType::f32 && a.in_features % kLaneFeatures == 0 &&
         a.in_features <= INT32_MAX - kBlockFeatures && aligned(a.weight, a.weight_stride, a.weight_dtype) &&
         aligned(a.input, a.input_stride, a.dtype);
}

int64_t count_few_rows(const LinearArguments& a) {
  int major = 0;
  // Measured on an H200. On older devices cuBLASLt computes more than eight.
  const bool takes_16 =
      a.dtype == a.weight_dtype && fits_few_rows(a) && find_compute_capability(major).ok() && major == 9;
  return takes_16 ? 2 * kOperandRows : kOperandRows;
}

Status linear_few_rows(const LinearLayers& layers, cudaStream_t stream) {
  Multiprocessors multiprocessors;
  Status status = find_multiprocessors(multiprocessors);
  int64_t shares = 0;
  for (int i = 0; i < layers.divided(); ++i) shares += shares_of(layers.layers[i]);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(shares, multiprocessors.count));
  const LinearArguments& a = layers.layers[0];
  with_cuda_float_type(a.dtype, [&](auto element) {
    with_cuda_float_type(a.weight_dtype, [&](auto weight) {
      using T = decltype(element);
      using W = decltype(weight);
      if constexpr (!std::is_same_v<W, float>) {
        constexpr int kPassRows = std::is_same_v<T, W> ? 2 * kOperandRows : kOperandRows;
        const auto pass = [&](auto rows, int64_t row) {
          constexpr int kRows = decltype(rows)::value;
          if constexpr (std::is_same_v<T, W>) {
            if (layers.gated) return launch<T, W, kRows, true>(layers, row, blocks, multiprocessors, stream);
          }
          return launch<T, W, kRows, false>(layers, row, blocks, multiprocessors, stream);
        };
        for (int64_t row = 0; row < a.tokens && status.ok(); row += kPassRows) {
          status = a.tokens - row > kOperandRows ? pass(std::integral_constant<int, kPassRows>(), row)
                                                 : pass(std::integral_constant<int, kOperandRows>(), row);
        }
      }
    });
  });
  return status;
}

}  // namespace kv
