// The linear layer of some tens of rows for Hopper, bound by the bandwidth of reading each weight once.
//
// Rows of input are the left operand of wgmma, rows of weights its right one. A tile is some neighbouring outputs of
// one layer, of all rows and over all features. A thread block computes tiles alone, so that a row's bits depend on
// nothing but the row and the weights, and on whether there are more than 64 rows. Where one layer gates another, every eight outputs of the gate are followed by the
// same eight of the other layer, so that a thread has both sums of an output.
#include <algorithm>

#include "kernels/linear/linear-few-rows.cuda.h"
#include "kernels/linear/linear-output.cuda.h"
#include "kernels/linear/linear-skinny-parts.cuda.h"
#include "kernels/linear/linear-skinny.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"
#include "runtime/tensor-map.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/cuda/stage-ring.cuda.h"

namespace kv::sm90a {
namespace {

constexpr int kPanelFeatures = 64;  // a swizzled row of 128 bytes
constexpr int kPanelBytes = 128;    // of one row
constexpr int kGroupRows = 64;      // what wgmma multiplies
constexpr int kRowsMultiple = 8;    // of the rows of input in shared memory, and of the outputs of a layer in a tile
constexpr int kWarpgroupThreads = 128;
constexpr int kFewOuts = 32;        // of a warpgroup
constexpr int kManyOuts = 64;
constexpr int kWideOuts = 112;      // where two warpgroups have the rows; of tiles that have no more, for products take most of the time
constexpr int kWidestOuts = 128;
constexpr int kMostRowGroups = 2;
constexpr int kManyOutputs = 8192;  // of a layer
constexpr int kMostRows = kMostRowGroups * kGroupRows;  // of a pass
constexpr int kMostStages = 16;
constexpr int kProducers = 2;
// A multiprocessor has one block, even while the launch before this one ends: two would leave another without work.
constexpr int kSharedMemory = 227 * 1024;

// Tiles of `kCount` warpgroups of up to `kOutsOfWarpgroup` outputs for each 64 rows; rows of `kPartsOfRow` parts each, in the
// 16-bit type of the weights.
template <class ElementType, class OutputType, int kPartsOfRow, int kCount, int kOutsOfWarpgroup, int kGroupsOfRows = 1>
struct Shape {
  using Element = ElementType;
  using Output = OutputType;
  static constexpr int kRowParts = kPartsOfRow;
  static constexpr int kOutGroups = kCount;
  static constexpr int kRows = kGroupsOfRows * kGroupRows;  // of a pass
  static constexpr int kConsumers = kGroupsOfRows * kCount * kWarpgroupThreads;
  static constexpr int kThreads = kConsumers + kProducers * kWarp;
  static constexpr int kWarpgroupOuts = kOutsOfWarpgroup;
  static constexpr int kOuts = kCount * kWarpgroupOuts;
  static constexpr int kPanels = kGroupsOfRows > 1 ? 1 : (kRowParts == 1 ? 4 : 2) / kCount;  // of a step, which fill a stage
  // Products of 16 features are added in turn to these many sums, so that one need not wait for the one before it. Where
  // there are four warpgroups, others multiply meanwhile.
  static constexpr int kChains = kGroupsOfRows > 1 ? 1 : 2;
};

struct Layer {
  CUtensorMap weight;  // [panel, out, feature]; gated [panel, out / 8, layer, out % 8, feature]
  LinearArguments arguments;
  int first_tile;
};

struct Parameters {
  Layer layers[LinearLayers::kMost];
  int count;
  bool gated;           // the first of two layers gates the second, and tiles are of both
  bool gate_follows;    // in memory, and so in tiles: not the gate's eight outputs but the others are first
  bool has_bias;        // some layer
  bool weights_at_rest;  // of all layers
  int tiles;            // of all layers
  int tile_outs;        // of each tile: rows of weights
  int rows;             // of each part of the input; those that are not there are zeros
  int stages;
  CUtensorMap input;    // [panel, part and row, feature]
  const float* scales;  // [row], or null

  __host__ __device__ int steps(int step_panels) const {
    const int panels = static_cast<int>(layers[0].arguments.in_features / kPanelFeatures);
    return (panels + step_panels - 1) / step_panels;
  }
  // Bytes of a panel.
  __host__ __device__ int input_bytes(int parts) const { return parts * rows * kPanelBytes; }
  __host__ __device__ int weight_bytes() const { return tile_outs * kPanelBytes; }
  // Outputs of a layer in a tile.
  __host__ __device__ int layer_outs() const { return gated ? tile_outs / 2 : tile_outs; }
};

template <class Shape>
__host__ __device__ int stage_bytes(const Parameters& parameters) {
  return Shape::kPanels * (parameters.input_bytes(Shape::kRowParts) + parameters.weight_bytes());
}

using Ring = StageRing<kMostStages>;

// In shared memory, ahead of the stages.
struct alignas(1024) Header {
  Ring ring;
};

struct Tile {
  const Layer* layer;
  int first_out;

  __device__ Tile(const Parameters& parameters, int index) {
    int at = 0;
    while (at + 1 < parameters.count && index >= parameters.layers[at + 1].first_tile) ++at;
    layer = &parameters.layers[at];
    first_out = (index - layer->first_tile) * parameters.layer_outs();
  }
};

// Where a block's copies or products have come to in the ring, of which it uses the first stages.
template <class Shape>
class Stages {
 public:
  __device__ Stages(const Parameters& parameters, unsigned char* shared)
      : ring_(reinterpret_cast<Header*>(shared)->ring),
        memory_(shared + sizeof(Header)),
        bytes_(stage_bytes<Shape>(parameters)),
        input_bytes_(Shape::kPanels * parameters.input_bytes(Shape::kRowParts)),
        count_(parameters.stages) {}

  __device__ Ring& ring() const { return ring_; }
  __device__ RingPosition<kMostStages> at() const { return at_; }
  __device__ unsigned char* input() const { return memory_ + at_.stage * bytes_; }
  __device__ unsigned char* weights() const { return input() + input_bytes_; }

  __device__ void advance() {
    if (++at_.stage < count_) return;
    at_ = {0, at_.parity ^ 1};
  }

 private:
  Ring& ring_;
  unsigned char* const memory_;
  const int bytes_;
  const int input_bytes_;
  const int count_;
  RingPosition<kMostStages> at_;
};

// ---- Producers: one thread brings the weights of each step by TMA, and one the input. ----

// The weights come ahead of the input, which may still be written when the block starts.
template <class Shape, bool kOfInput>
__device__ void produce(const Parameters& parameters, Stages<Shape> stages) {
  const uint64_t once = ptx::evict_first_policy();
  const int steps = parameters.steps(Shape::kPanels);
  const int bytes = Shape::kPanels * (kOfInput ? parameters.input_bytes(Shape::kRowParts) : parameters.weight_bytes());
  for (int index = static_cast<int>(blockIdx.x); index < parameters.tiles; index += static_cast<int>(gridDim.x)) {
    const Tile tile(parameters, index);
    for (int step = 0; step < steps; ++step) {
      stages.ring().wait_empty(stages.at());
      uint64_t* full = &stages.ring().full[stages.at().stage];
      ptx::mbarrier_arrive_expect_bytes(full, bytes);
      const int panel = step * Shape::kPanels;
      if constexpr (kOfInput) {
        ptx::tensor_copy(stages.input(), &parameters.input, 0, 0, panel, full);
      } else if (parameters.gated) {
        ptx::tensor_copy(stages.weights(), &tile.layer->weight, {0, 0, 0, tile.first_out / kRowsMultiple, panel}, full, once);
      } else {
        ptx::tensor_copy(stages.weights(), &tile.layer->weight, 0, tile.first_out, panel, full, once);
      }
      stages.advance();
    }
  }
}

// ---- Consumers: each warpgroup has its part of a tile's outputs. ----

template <class Shape>
class Consumer {
 public:
  __device__ Consumer(const Parameters& parameters, const Stages<Shape>& stages)
      : parameters_(parameters),
        stages_(stages),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroupThreads),
        first_out_(warpgroup() % Shape::kOutGroups * Shape::kWarpgroupOuts),
        first_row_(warpgroup() / Shape::kOutGroups * kGroupRows) {}

  __device__ void run() {
    for (int index = static_cast<int>(blockIdx.x); index < parameters_.tiles; index += static_cast<int>(gridDim.x)) {
      float chains[kChains][kSums];
      multiply(chains);
      finish(Tile(parameters_, index), chains[0]);
    }
  }

 private:
  using Element = typename Shape::Element;
  using Output = typename Shape::Output;
  static constexpr int kSums = Shape::kWarpgroupOuts / 2;  // of a thread
  static constexpr int kChains = Shape::kChains;

  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads; }

  // The sums are in the first chain afterwards.
  __device__ void multiply(float (&chains)[kChains][kSums]) {
    const int steps = parameters_.steps(Shape::kPanels);
    RingPosition<kMostStages> before;
    for (int step = 0; step < steps; ++step) {
      stages_.ring().wait_full(stages_.at());
#pragma unroll
      for (auto& chain : chains) ptx::pin_registers(chain);
      ptx::wgmma_fence();
      issue(step == 0, chains);
      ptx::wgmma_commit();
      // One step's products run while the next are issued.
      if (step > 0) {
        ptx::wgmma_wait<1>();
        stages_.ring().release_by_thread(before);
      }
      before = stages_.at();
      stages_.advance();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& chain : chains) ptx::pin_registers(chain);
    stages_.ring().release_by_thread(before);
#pragma unroll
    for (int chain = 1; chain < kChains; ++chain) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) chains[0][i] += chains[chain][i];
    }
  }

  // The products of a stage. What lies behind the rows and outputs that are there may be anything, as may its products.
  __device__ void issue(bool first_step, float (&chains)[kChains][kSums]) const {
    const uint64_t inputs = ptx::wgmma_operand(stages_.input() + first_row_ * kPanelBytes);
    const uint64_t weights = ptx::wgmma_operand(stages_.weights() + first_out_ * kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
#pragma unroll
      for (int part = Shape::kRowParts - 1; part >= 0; --part) {
        const int input_at = panel * parameters_.input_bytes(Shape::kRowParts) + part * parameters_.input_bytes(1);
#pragma unroll
        for (int k = 0; k < kPanelFeatures / 16; ++k) {
          const bool is_first = first_step && panel == 0 && part == Shape::kRowParts - 1 && k < kChains;
          ptx::WgmmaShared<Element, Shape::kWarpgroupOuts>::issue(
              chains[k % kChains], ptx::wgmma_advance(inputs, input_at + 32 * k),
              ptx::wgmma_advance(weights, panel * parameters_.weight_bytes() + 32 * k), !is_first);
        }
      }
    }
  }

  // Where a thread's outputs are: sums 4 * i .. 4 * i + 3 are of the outputs 8 * i and 8 * i + 1, first of its row, then of
  // the eighth behind it. Where a layer gates, of every two such groups one is the gate's, the other of what it gates.
  struct Place {
    const LinearArguments& layer;
    int64_t first;  // of the layer's outputs
    int outs;       // from there on
  };

  __device__ Place place_of(const Tile& tile) const {
    const LinearArguments& a = tile.layer->arguments;
    const int layers = parameters_.gated ? 2 : 1;
    const int first = first_out_ / layers;
    const int end = min(first + Shape::kWarpgroupOuts / layers, parameters_.layer_outs());
    const int own = first + thread_ % 4 * 2;
    return {a, tile.first_out + own, static_cast<int>(min(int64_t{end}, a.out_features - tile.first_out)) - own};
  }

  __device__ int row_of(int half) const { return first_row_ + thread_ / kWarp * 16 + thread_ % kWarp / 4 + 8 * half; }

  // What is rarely asked for is apart, so that few instructions are fetched.
  __device__ void finish(const Tile& tile, float (&sums)[kSums]) const {
    const Place place = place_of(tile);
    const LinearArguments& a = place.layer;
    if constexpr (Shape::kRowParts > 1) {
      float scales[2];
      for (int half = 0; half < 2; ++half) scales[half] = row_of(half) < a.tokens ? parameters_.scales[row_of(half)] : 0.0f;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] *= scales[i / 2 % 2];
    }
    if (parameters_.has_bias) add_bias(place, sums);
    if constexpr (Shape::kRowParts == 1) {  // f32 rows are gated behind this kernel
      if (parameters_.gated) gate(sums);
    }
    Output* output = static_cast<Output*>(a.output) + place.first;
    const bool pairs = a.output_stride % 2 == 0 && a.out_features % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(output) % sizeof(Pair) == 0;
    if (pairs) {
      write<Pair>(place, sums);
    } else {
      write<Output>(place, sums);
    }
  }

  __device__ void add_bias(const Place& place, float (&sums)[kSums]) const {
    const bool gated = parameters_.gated;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const bool of_second = gated && (i % 2 == 1) != parameters_.gate_follows;
      const LinearArguments& a = of_second ? parameters_.layers[1].arguments : place.layer;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int out = 8 * (gated ? i / 2 : i) + next;
        if (a.bias == nullptr || out >= place.outs) continue;
        const float bias = bias_of(a, place.first + out);
        sums[4 * i + next] += bias;
        sums[4 * i + 2 + next] += bias;
      }
    }
  }

  // The results take the places of the first half of the sums.
  __device__ void gate(float (&sums)[kSums]) const {
    const bool gate_follows = parameters_.gate_follows;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const int at = i / 4 * 8 + i % 4;
      const float low = sums[at];
      const float high = sums[at + 4];
      sums[i] = to_float(gate_follows ? gated_of<Output>(high, low) : gated_of<Output>(low, high));
    }
  }

  // As pairs, of which both outputs are there or neither, or one by one.
  template <class Unit>
  __device__ void write(const Place& place, float (&sums)[kSums]) const {
    constexpr int kOfUnit = sizeof(Unit) / sizeof(Output);
    const LinearArguments& a = place.layer;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_of(half) >= a.tokens) continue;
      Output* row = static_cast<Output*>(a.output) + row_of(half) * a.output_stride + place.first;
      const auto each = [&](const auto& visit) {
#pragma unroll
        for (int i = 0; i < kSums / 4; ++i) {
#pragma unroll
          for (int next = 0; next < 2; next += kOfUnit) {
            if (8 * i + next < place.outs) visit(reinterpret_cast<Unit*>(row + 8 * i + next), &sums[4 * i + 2 * half + next]);
          }
        }
      };
      // All that is read is read before the first is written, so that one wait serves them.
      if (a.accumulate) {
        each([](const Unit* at, float* sum) {
          const Unit before = *at;
          for (int i = 0; i < kOfUnit; ++i) sum[i] += to_float(reinterpret_cast<const Output*>(&before)[i]);
        });
      }
      each([](Unit* at, const float* sum) {
        Unit unit;
        for (int i = 0; i < kOfUnit; ++i) reinterpret_cast<Output*>(&unit)[i] = from_float<Output>(sum[i]);
        *at = unit;
      });
    }
  }

  struct alignas(2 * sizeof(Output)) Pair {
    Output element[2];
  };

  const Parameters& parameters_;
  Stages<Shape> stages_;
  const int thread_;     // of the warpgroup
  const int first_out_;  // of the warpgroup, in a tile
  const int first_row_;  // of the warpgroup, in a pass
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) multiply_skinny(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) {
    reinterpret_cast<Header*>(shared)->ring.init(Shape::kConsumers, kProducers);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == Shape::kConsumers) {
    ptx::prefetch_tensor_map(&Tile(parameters, static_cast<int>(blockIdx.x)).layer->weight);
    ptx::prefetch_tensor_map(&parameters.input);
  }
  __syncthreads();
  const Stages<Shape> stages(parameters, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const bool brings_weights = thread / kWarp == Shape::kConsumers / kWarp;
  if (!brings_weights || !parameters.weights_at_rest) ptx::wait_for_previous_kernel();
  if (thread < Shape::kConsumers) {
    Consumer<Shape>(parameters, stages).run();
  } else if (thread == Shape::kConsumers) {
    produce<Shape, false>(parameters, stages);
  } else if (thread == Shape::kConsumers + kWarp) {
    produce<Shape, true>(parameters, stages);
  }
}

// ---- Host ----

// A matrix [row, column] of 16-bit elements, as [panel, row, feature].
Status encode(DType dtype, const void* data, int64_t columns, int64_t rows, int64_t stride, int box_rows,
              int box_panels, CUtensorMap* map) {
  return encode_tensor_map(TensorBox{dtype,
                                     data,
                                     {kPanelFeatures, rows, columns / kPanelFeatures},
                                     {stride, kPanelFeatures},
                                     {kPanelFeatures, box_rows, box_panels}},
                           map);
}

// Two matrices [row, column] of one stride, as [panel, row / 8, matrix, row % 8, feature].
Status encode_both(DType dtype, const void* first, const void* second, int64_t columns, int64_t rows, int64_t stride,
                   int box_rows, int box_panels, CUtensorMap* map) {
  const int64_t apart = (static_cast<const char*>(second) - static_cast<const char*>(first)) / static_cast<int64_t>(byte_size(dtype));
  return encode_tensor_map(
      TensorBoxOf<5>{dtype,
                     first,
                     {kPanelFeatures, kRowsMultiple, 2, rows / kRowsMultiple, columns / kPanelFeatures},
                     {stride, apart, kRowsMultiple * stride, kPanelFeatures},
                     {kPanelFeatures, kRowsMultiple, 2, box_rows / kRowsMultiple, box_panels}},
      map);
}

Status find_multiprocessors(int& count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return cuda_status(error);
}

int64_t count_tiles(const LinearLayers& layers, int64_t tile_outs) {
  const int64_t layer_outs = layers.gated ? tile_outs / 2 : tile_outs;
  int64_t tiles = 0;
  for (int i = 0; i < layers.divided(); ++i) tiles += (layers.layers[i].out_features + layer_outs - 1) / layer_outs;
  return tiles;
}

// The fewest outputs of a tile with which the blocks finish in as few rounds as they can.
int choose_tile_outs(const LinearLayers& layers, int blocks, int most_outs) {
  const int64_t rounds = (count_tiles(layers, most_outs) + blocks - 1) / blocks;
  const int multiple = layers.gated ? 2 * kRowsMultiple : kRowsMultiple;
  int outs = multiple;
  while (count_tiles(layers, outs) > rounds * blocks) outs += multiple;
  return outs;
}

// The workspace: scales of the rows, then their parts.
constexpr size_t kScaleBytes = kMostRows * sizeof(float);

// The input's rows first_row .. first_row + rows - 1, as a tensor for TMA.
template <class Shape>
Status prepare_input(const LinearArguments& a, int64_t first_row, int64_t rows, void* workspace, cudaStream_t stream,
                     Parameters& parameters) {
  using Element = typename Shape::Element;
  const char* input =
      static_cast<const char*>(a.input) + first_row * a.input_stride * static_cast<int64_t>(byte_size(a.dtype));
  const int box_rows = Shape::kRowParts * parameters.rows;
  if constexpr (Shape::kRowParts == 1) {
    return encode(a.dtype, input, a.in_features, rows, a.input_stride, box_rows, Shape::kPanels, &parameters.input);
  } else {
    auto* scales = static_cast<float*>(workspace);
    const RowParts<Element> parts{reinterpret_cast<Element*>(static_cast<char*>(workspace) + kScaleBytes), scales,
                                  parameters.rows};
    const Status status = launch_overlapped(split_rows<Element>, parameters.rows, kSplitThreads, 0, stream,
                                            reinterpret_cast<const float*>(input), a.input_stride, rows, a.in_features,
                                            parts);
    if (!status.ok()) return status;
    parameters.scales = scales;
    return encode(a.weight_dtype, parts.parts, a.in_features, box_rows, a.in_features, box_rows, Shape::kPanels,
                  &parameters.input);
  }
}

// The rows first_row .. first_row + rows - 1 of all layers.
template <class Shape>
Status launch(const LinearLayers& layers, int tile_outs, int blocks, int64_t first_row, int64_t rows, void* workspace,
              cudaStream_t stream) {
  Parameters parameters{};
  parameters.count = layers.divided();
  parameters.gated = layers.gated;
  parameters.weights_at_rest = layers.weights_at_rest();
  parameters.gate_follows = layers.gated && layers.layers[0].weight > layers.layers[1].weight;
  parameters.tile_outs = tile_outs;
  parameters.rows = static_cast<int>((rows + kRowsMultiple - 1) / kRowsMultiple * kRowsMultiple);
  for (int i = 0; i < layers.count; ++i) {
    const LinearArguments& a = layers.layers[i];
    Layer& layer = parameters.layers[i];
    layer.arguments = a;
    parameters.has_bias = parameters.has_bias || a.bias != nullptr;
    layer.arguments.tokens = rows;
    layer.arguments.output =
        static_cast<char*>(a.output) + first_row * a.output_stride * static_cast<int64_t>(byte_size(a.dtype));
    if (i >= parameters.count) continue;
    layer.first_tile = parameters.tiles;
    parameters.tiles += static_cast<int>((a.out_features + parameters.layer_outs() - 1) / parameters.layer_outs());
    const void* gated = layers.gated ? layers.layers[1].weight : nullptr;
    const Status status =
        layers.gated ? encode_both(a.weight_dtype, std::min(a.weight, gated), std::max(a.weight, gated), a.in_features,
                                   a.out_features, a.weight_stride, parameters.layer_outs(), Shape::kPanels, &layer.weight)
                     : encode(a.weight_dtype, a.weight, a.in_features, a.out_features, a.weight_stride, tile_outs,
                              Shape::kPanels, &layer.weight);
    if (!status.ok()) return status;
  }
  Status status = prepare_input<Shape>(layers.layers[0], first_row, rows, workspace, stream, parameters);
  if (!status.ok()) return status;
  // wgmma reads past the rows and outputs of the last stage; there must be memory.
  const int past = std::max({0, (Shape::kRows - parameters.rows) * kPanelBytes - parameters.weight_bytes(),
                             (Shape::kOuts - tile_outs) * kPanelBytes});
  parameters.stages = std::min(
      kMostStages, (kSharedMemory - static_cast<int>(sizeof(Header)) - past) / stage_bytes<Shape>(parameters));
  const auto kernel = multiply_skinny<Shape>;
  status = cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory));
  if (!status.ok()) return status;
  return launch_overlapped(kernel, std::min(parameters.tiles, blocks), Shape::kThreads, kSharedMemory, stream,
                           parameters);
}

template <class Shape>
Status launch_passes(const LinearLayers& layers, int tile_outs, int blocks, void* workspace, cudaStream_t stream) {
  const int64_t tokens = layers.layers[0].tokens;
  Status status;
  for (int64_t row = 0; row < tokens && status.ok(); row += Shape::kRows) {
    const int64_t rows = std::min<int64_t>(Shape::kRows, tokens - row);
    status = launch<Shape>(layers, tile_outs, blocks, row, rows, workspace, stream);
  }
  return status;
}

template <class Element, class Output, int kPartsOfRow>
Status run(const LinearLayers& layers, void* workspace, cudaStream_t stream) {
  int blocks = 0;
  const Status status = find_multiprocessors(blocks);
  if (!status.ok()) return status;
  // Three parts of so many rows leave no room for stages.
  if constexpr (kPartsOfRow < 3) {
    if (layers.layers[0].tokens > kGroupRows) {
      const int tile_outs = choose_tile_outs(layers, blocks, 2 * kWidestOuts);
      const auto passes = tile_outs <= 2 * kWideOuts
                              ? launch_passes<Shape<Element, Output, kPartsOfRow, 2, kWideOuts, kMostRowGroups>>
                              : launch_passes<Shape<Element, Output, kPartsOfRow, 2, kWidestOuts, kMostRowGroups>>;
      return passes(layers, tile_outs, blocks, workspace, stream);
    }
  }
  const int tile_outs = choose_tile_outs(layers, blocks, 2 * kManyOuts);
  const auto passes = tile_outs <= kFewOuts       ? launch_passes<Shape<Element, Output, kPartsOfRow, 1, kFewOuts>>
                      : tile_outs <= 2 * kFewOuts ? launch_passes<Shape<Element, Output, kPartsOfRow, 2, kFewOuts>>
                                                  : launch_passes<Shape<Element, Output, kPartsOfRow, 2, kManyOuts>>;
  return passes(layers, tile_outs, blocks, workspace, stream);
}

}  // namespace

size_t linear_skinny_workspace(const LinearLayers& layers) {
  const LinearArguments& a = layers.layers[0];
  return a.dtype == DType::f32 ? kScaleBytes + size_t{kMostParts} * kMostRows * a.in_features * sizeof(__half) : 0;
}

Status linear_skinny(const LinearLayers& layers, void* workspace, cudaStream_t stream) {
  const LinearArguments& a = layers.layers[0];
  const bool parts = a.dtype == DType::f32;
  if (a.weight_dtype == DType::f16) {
    return parts ? run<__half, float, kParts<__half>>(layers, workspace, stream)
                 : run<__half, __half, 1>(layers, workspace, stream);
  }
  return parts ? run<__nv_bfloat16, float, kParts<__nv_bfloat16>>(layers, workspace, stream)
               : run<__nv_bfloat16, __nv_bfloat16, 1>(layers, workspace, stream);
}

}  // namespace kv::sm90a

namespace kv {

bool fits_skinny(const LinearArguments& a) {
  int major = 0;
  if (a.tokens <= count_few_rows(a) || !find_compute_capability(major).ok() || major != 9) return false;
  if (a.in_features % sm90a::kPanelFeatures != 0 || !fits_few_rows(a) || a.out_features > INT32_MAX / 2) return false;
  if (a.dtype == DType::f32) return true;
  // Measured on an H200: of more rows cuBLASLt is faster, where there are few outputs, for each tile reads all rows.
  const int64_t most_rows = a.out_features < sm90a::kManyOutputs ? sm90a::kGroupRows : sm90a::kMostRows;
  return a.dtype == a.weight_dtype && a.tokens <= most_rows;
}

bool fits_skinny_gated(const LinearArguments& gate, const LinearArguments& up) {
  constexpr int64_t kMostApart = int64_t{1} << 40;  // bytes, of axes of a tensor map
  const int64_t apart = static_cast<const char*>(up.weight) - static_cast<const char*>(gate.weight);
  return gate.dtype == gate.weight_dtype && up.weight_dtype == gate.weight_dtype && fits_skinny(gate) && fits_skinny(up) &&
         gate.weight_stride == up.weight_stride && gate.out_features % sm90a::kRowsMultiple == 0 &&
         std::abs(apart) < kMostApart;
}

}  // namespace kv
