// compress-24: metadata as the tensor cores read it, and compression bit for bit against the host.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/compress-24/compress-24.cuda.h"
#include "ptx/mma-sparse.cuda.h"
#include "ptx/mma.cuda.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/compress-24-reference.cuda.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::tests {
namespace {

// ---- Metadata, as the tensor cores read it. ----

// out[0] = a * b with a compressed, out[1] with the dense a, [16, 8] each, by one warp; a is [16, 64].
template <typename Element>
__global__ void multiply_kernel(const uint16_t* non_zeros, const uint32_t* metadata, const uint16_t* dense,
                                const uint16_t* b, float* out) {
  const int g = threadIdx.x / 4;
  const int c = threadIdx.x % 4;
  const auto two = [](const uint16_t* from) { return uint32_t{from[0]} | uint32_t{from[1]} << 16; };
  const auto a_fragment = [&](const uint16_t* a, int columns, int column, uint32_t(&fragment)[4]) {
    for (int i = 0; i < 4; ++i) fragment[i] = two(a + (g + i % 2 * 8) * columns + column + i / 2 * 8 + 2 * c);
  };
  uint32_t columns[8];  // of b, [8, 64] transposed
  for (int i = 0; i < 8; ++i) columns[i] = two(b + g * 64 + 8 * i + 2 * c);
  float sparse[4] = {};
  float full[4] = {};
  uint32_t fragment[4];
  a_fragment(non_zeros, 32, 0, fragment);
  ptx::mma_sparse_m16n8k32<Element, 0>(sparse, fragment, columns, metadata[threadIdx.x]);
  a_fragment(non_zeros, 32, 16, fragment);
  ptx::mma_sparse_m16n8k32<Element, 1>(sparse, fragment, columns + 4, metadata[threadIdx.x]);
  for (int k = 0; k < 4; ++k) {
    a_fragment(dense, 64, 16 * k, fragment);
    ptx::mma_m16n8k16<Element>(full, fragment, columns[2 * k], columns[2 * k + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const int at = (g + i / 2 * 8) * 8 + 2 * c + i % 2;
    out[at] = sparse[i];
    out[128 + at] = full[i];
  }
}

struct MetadataCase {
  std::string name;
  DType dtype;
};

template <typename Element>
Outcome multiply(Random& random) {
  int wrong = 0;
  for (int round = 0; round < 20; ++round) {
    // Every row a key of 64 dims, so that the host's compression gives the words.
    std::vector<uint16_t> dense(64 * 64);
    std::vector<int> values(dense.size());
    for (int group = 0; group < 64 * 16; ++group) {
      const int first = pick(random, 0, 2);
      const int second = pick(random, first + 1, 3);
      for (const int place : {first, second}) {
        values[4 * group + place] = pick(random, 1, 100) * (pick(random, 0, 1) * 2 - 1);
        dense[4 * group + place] = bits_of<Element>(values[4 * group + place]);
      }
    }
    const HostBlock block = compress_on_host(dense.data(), nullptr, KvOperand::keys, DType::f16, 64);
    std::vector<uint16_t> non_zeros(16 * 32);
    for (int i = 0; i < 16 * 32; ++i) non_zeros[i] = block.non_zeros[key_non_zero(i / 32, i % 32, 64)];
    // Eight columns of the identity, or integers.
    std::vector<uint16_t> b(8 * 64);
    std::vector<int> b_values(b.size());
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < 64; ++k) {
        b_values[column * 64 + k] = round < 8 ? k == round * 8 + column : pick(random, -100, 100);
        b[column * 64 + k] = bits_of<Element>(b_values[column * 64 + k]);
      }
    }
    DeviceBuffer<uint16_t> non_zeros_buffer(non_zeros), dense_buffer(dense), b_buffer(b);
    DeviceBuffer<uint32_t> metadata_buffer(block.metadata);
    DeviceBuffer<float> out_buffer(std::vector<float>(256, NAN));
    multiply_kernel<Element><<<1, 32>>>(non_zeros_buffer.get(), metadata_buffer.get(), dense_buffer.get(),
                                        b_buffer.get(), out_buffer.get());
    succeeds(cudaGetLastError());
    succeeds(cudaDeviceSynchronize());
    const std::vector<float> out = out_buffer.host();
    for (int i = 0; i < 128; ++i) {
      int expected = 0;
      for (int k = 0; k < 64; ++k) expected += values[i / 8 * 64 + k] * b_values[i % 8 * 64 + k];
      wrong += out[i] != static_cast<float>(expected) || out[128 + i] != static_cast<float>(expected);
    }
  }
  return {wrong == 0, std::to_string(wrong) + " of 2560 wrong"};
}

// ---- Compression. ----

struct CompressionCase {
  std::string name;
  KvOperand operand = KvOperand::keys;
  DType dtype = DType::f16;
  int head_dim = 128;
  double share = 1.0;  // of the dense blocks that become sparse
  bool masked = false;
  bool any_bits = false;  // NaN, infinities, zeros of both signs, ties
};

std::vector<uint16_t> random_blocks(int64_t elements, DType dtype, bool any_bits, Random& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> result(elements);
  const uint16_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  const uint16_t special[] = {0, 0x8000, infinity, uint16_t(infinity | 0x8000), uint16_t(infinity | 1), 0xffff, 0x3c00};
  for (uint16_t& bits : result) {
    bits = dtype == DType::f16 ? bits_of<__half>(normal(random)) : bits_of<__nv_bfloat16>(normal(random));
    if (any_bits && pick(random, 0, 1) != 0) bits = special[pick(random, 0, 6)];
  }
  return result;
}

Outcome compress(const CompressionCase& test, Random& random) {
  constexpr int kKvHeads = 3;
  constexpr int kSlots = 2;
  constexpr int kWidth = 700;
  constexpr int kDenseBlocks = 1500;
  constexpr int kSparseBlocks = 1600;
  const int64_t elements = int64_t{kBlock24Tokens} * test.head_dim;
  std::vector<uint16_t> dense = random_blocks(kDenseBlocks * elements, test.dtype, test.any_bits, random);
  std::vector<uint8_t> mask(kKvHeads * elements);
  for (int head = 0; head < kKvHeads; ++head) {
    for (int group = 0; group < elements / 4; ++group) {
      const int stride = test.operand == KvOperand::keys ? 1 : test.head_dim;
      const int64_t first = test.operand == KvOperand::keys
                                ? 4 * group
                                : group / test.head_dim * 4 * test.head_dim + group % test.head_dim;
      for (int kept = 0; kept < 2; ++kept) mask[head * elements + first + pick(random, 0, 3) * stride] = 1;
    }
  }
  // Heads of several lengths over blocks in random order; some of the first blocks are sparse already.
  const std::vector<int> order = shuffled(kDenseBlocks, random);
  const std::vector<int> ids = shuffled(kSparseBlocks, random);
  std::vector<int> table(kSlots * kKvHeads * kWidth, block_entry(BlockKind::none, 0));
  std::vector<uint16_t> expected_dense = dense;
  std::vector<uint16_t> expected_non_zeros(kSparseBlocks * sparse_block_elements(test.head_dim), 0xabcd);
  std::vector<uint32_t> expected_metadata(kSparseBlocks * sparse_block_words(test.head_dim), 0xabcdabcd);
  std::vector<Pruning> prunings;
  const std::vector<uint16_t> untouched_non_zeros = expected_non_zeros;
  const std::vector<uint32_t> untouched_metadata = expected_metadata;
  std::vector<int> expected_table;
  int next_dense = 0;
  int next_id = 0;
  int most_blocks = 0;
  const int lengths[] = {1, 5, 200, 300, 0, 610};
  for (int row = 0; row < kSlots * kKvHeads; ++row) {
    for (int block = 0; block < lengths[row]; ++block) {
      const bool sparse = row % 2 == 1 && block % 7 == 3;
      table[row * kWidth + block] = sparse ? block_entry(BlockKind::sparse_24, 1000 + block) : order[next_dense++];
    }
  }
  expected_table = table;
  for (int row = kSlots * kKvHeads - 1; row >= 0; --row) {
    Pruning pruning{row, lengths[row] > 20 ? 2 : 0, lengths[row] > 20 ? lengths[row] - 3 : lengths[row], 0, 0, 0};
    std::vector<int> blocks;
    for (int block = pruning.first_block; block < pruning.end_block; ++block) {
      if (is_dense(table[row * kWidth + block])) blocks.push_back(block);
    }
    pruning.count = static_cast<int>(std::lround(test.share * static_cast<double>(blocks.size())));
    pruning.first_id = next_id;
    next_id += pruning.count;
    std::vector<int> dense_ids;
    for (const int block : blocks) dense_ids.push_back(table[row * kWidth + block]);
    std::sort(dense_ids.begin(), dense_ids.end());
    pruning.freed_from = pruning.count > 0 ? dense_ids[dense_ids.size() - pruning.count] : kDenseBlocks;
    most_blocks = std::max(most_blocks, pruning.end_block - pruning.first_block);
    prunings.push_back(pruning);

    std::vector<HostBlock> compressed;
    for (const int block : blocks) {
      compressed.push_back(compress_on_host(dense.data() + table[row * kWidth + block] * elements,
                                            test.masked ? mask.data() + row % kKvHeads * elements : nullptr,
                                            test.operand, test.dtype, test.head_dim));
    }
    std::vector<int> by_loss(blocks.size());
    std::iota(by_loss.begin(), by_loss.end(), 0);
    std::stable_sort(by_loss.begin(), by_loss.end(),
                     [&](int a, int b) { return compressed[a].loss < compressed[b].loss; });
    std::vector<bool> chosen(blocks.size());
    for (int i = 0; i < pruning.count; ++i) chosen[by_loss[i]] = true;
    int id = pruning.first_id;
    std::vector<int> vacated, moving;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const int place = table[row * kWidth + blocks[i]];
      if (chosen[i]) {
        const int sparse = ids[id++];
        expected_table[row * kWidth + blocks[i]] = block_entry(BlockKind::sparse_24, sparse);
        std::copy(compressed[i].non_zeros.begin(), compressed[i].non_zeros.end(),
                  expected_non_zeros.begin() + sparse * sparse_block_elements(test.head_dim));
        std::copy(compressed[i].metadata.begin(), compressed[i].metadata.end(),
                  expected_metadata.begin() + sparse * sparse_block_words(test.head_dim));
        if (place < pruning.freed_from) vacated.push_back(place);
      } else if (place >= pruning.freed_from) {
        moving.push_back(blocks[i]);
      }
    }
    for (size_t i = 0; i < moving.size(); ++i) {
      const int from = table[row * kWidth + moving[i]];
      std::copy_n(dense.begin() + from * elements, elements, expected_dense.begin() + vacated[i] * elements);
      expected_table[row * kWidth + moving[i]] = vacated[i];
    }
  }

  DeviceBuffer<uint16_t> dense_buffer(dense), non_zeros_buffer(untouched_non_zeros);
  DeviceBuffer<uint32_t> metadata_buffer(untouched_metadata);
  DeviceBuffer<int> table_buffer(table), ids_buffer(ids);
  DeviceBuffer<uint8_t> mask_buffer(mask);
  DeviceBuffer<Pruning> prunings_buffer(prunings);
  DeviceBuffer<Fault> fault_buffer(size_t{1});
  Compress24Arguments arguments;
  arguments.operand = test.operand;
  arguments.dtype = test.dtype;
  arguments.head_dim = test.head_dim;
  arguments.dense = dense_buffer.get();
  arguments.dense_block_count = kDenseBlocks;
  arguments.non_zeros = non_zeros_buffer.get();
  arguments.metadata = metadata_buffer.get();
  arguments.sparse_block_count = kSparseBlocks;
  arguments.table = table_buffer.get();
  arguments.table_width = kWidth;
  arguments.kv_heads = kKvHeads;
  arguments.slot_count = kSlots;
  arguments.prunings = prunings_buffer.get();
  arguments.pruning_count = static_cast<int>(prunings.size());
  arguments.most_blocks = most_blocks;
  arguments.ids = ids_buffer.get();
  arguments.id_count = kSparseBlocks;
  arguments.element_mask = test.masked ? mask_buffer.get() : nullptr;
  DeviceBuffer<unsigned char> counters(pruning_counter_bytes(arguments), 0);
  DeviceBuffer<unsigned char> workspace(pruning_plan_bytes(arguments), 0x5a);
  succeeds(enqueue_compress_24(arguments, counters.get(), workspace.get(), {fault_buffer.get()}, nullptr));
  succeeds(cudaDeviceSynchronize());

  const auto differences = [](const auto& a, const auto& b) {
    int count = 0;
    for (size_t i = 0; i < a.size(); ++i) count += a[i] != b[i];
    return count;
  };
  int faults = fault_buffer.host()[0].claimed;
  for (const unsigned char left : counters.host()) faults += left;
  const int counts[] = {differences(non_zeros_buffer.host(), expected_non_zeros),
                        differences(metadata_buffer.host(), expected_metadata),
                        differences(dense_buffer.host(), expected_dense),
                        differences(table_buffer.host(), expected_table)};
  std::string detail = "different non-zeros, words, dense, places:";
  for (const int count : counts) detail += " " + std::to_string(count);
  detail += ", faults " + std::to_string(faults);
  return {counts[0] + counts[1] + counts[2] + counts[3] + faults == 0, detail};
}

std::vector<CompressionCase> compression_cases() {
  std::vector<CompressionCase> list;
  for (const auto operand : {KvOperand::keys, KvOperand::values}) {
    for (const int head_dim : {128, 64}) {
      for (const auto dtype : {DType::f16, DType::bf16}) {
        for (const bool masked : {false, true}) {
          for (const double share : {1.0, 0.5, 0.0}) {
            for (const bool any_bits : {false, true}) {
              // Losses that are NaN or infinite do not order the blocks.
              if (any_bits && share == 0.5) continue;
              CompressionCase test{"", operand, dtype, head_dim, share, masked, any_bits};
              test.name = std::string(operand == KvOperand::keys ? "keys" : "values") +
                          (dtype == DType::f16 ? " f16 d" : " bf16 d") + std::to_string(head_dim) +
                          (masked ? " masked" : "") + " share " + std::to_string(share).substr(0, 3) +
                          (any_bits ? " any bits" : "");
              if (!only_small_cases() || (dtype == DType::f16 && share == 0.5)) list.push_back(test);
            }
          }
        }
      }
    }
  }
  return list;
}

}  // namespace

TEST("mma.sp reads the metadata that the host writes") {
  const std::vector<MetadataCase> cases{{"one-hot and integers, f16", DType::f16},
                                        {"one-hot and integers, bf16", DType::bf16}};
  run_cases(cases, [](const MetadataCase& test, Random& random) {
    return with_16_bit_type(test.dtype, [&](auto element) { return multiply<decltype(element)>(random); });
  });
}

TEST("compress-24 gives the host's bits") { run_cases(compression_cases(), compress); }

}  // namespace kv::tests

// For torch-hierasparse.py, contiguous tensors; returns 0, or prints why not.
// `sizes`: 1 for values, head dim, bf16, dense blocks, sparse blocks, table width, kv heads, slots, prunings, most
// blocks of one, ids. `pointers`: dense, non-zeros, metadata, map, prunings, ids, workspace, counters, fault.
KV_FOR_PYTHON int kv_compress(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::Compress24Arguments arguments;
  arguments.operand = sizes[0] != 0 ? kv::KvOperand::values : kv::KvOperand::keys;
  arguments.head_dim = static_cast<int32_t>(sizes[1]);
  arguments.dtype = sizes[2] != 0 ? kv::DType::bf16 : kv::DType::f16;
  arguments.dense_block_count = static_cast<int32_t>(sizes[3]);
  arguments.sparse_block_count = static_cast<int32_t>(sizes[4]);
  arguments.table_width = static_cast<int32_t>(sizes[5]);
  arguments.kv_heads = static_cast<int32_t>(sizes[6]);
  arguments.slot_count = static_cast<int32_t>(sizes[7]);
  arguments.pruning_count = static_cast<int32_t>(sizes[8]);
  arguments.most_blocks = static_cast<int32_t>(sizes[9]);
  arguments.id_count = static_cast<int32_t>(sizes[10]);
  arguments.dense = pointers[0];
  arguments.non_zeros = pointers[1];
  arguments.metadata = static_cast<uint32_t*>(pointers[2]);
  arguments.table = static_cast<int32_t*>(pointers[3]);
  arguments.prunings = static_cast<const kv::Pruning*>(pointers[4]);
  arguments.ids = static_cast<const int32_t*>(pointers[5]);
  const kv::FaultSink faults{static_cast<kv::Fault*>(pointers[8]), "compress-24"};
  const kv::Status status =
      kv::enqueue_compress_24(arguments, pointers[7], pointers[6], faults, static_cast<cudaStream_t>(stream));
  return kv::tests::result_for_python(status);
}
