#include <string>
#include <vector>

#include "kernels/coded-key-scores/coded-key-scores.cuda.h"
#include "runtime/isa.h"
#include "shared/paged/paged-faults.h"
#include "tests/check.h"
#include "tests/coded-case.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"

namespace kv::tests {
namespace {

struct Case {
  std::string name;
  CodedSizes sizes;
};

std::vector<Case> all_cases() {
  std::vector<Case> list;
  const auto add = [&](CodedSizes sizes) {
    const char* type = sizes.dtype == DType::f32 ? "f32" : sizes.dtype == DType::f16 ? "f16" : "bf16";
    const std::string name = std::string(type) + ", heads of " + std::to_string(sizes.head_dim) + ", sub-vectors of " +
                             std::to_string(sizes.sub_dim) + ", " + std::to_string(sizes.centroids) + " centroids in " +
                             std::to_string(sizes.bits) + " bits" + (sizes.separate ? ", a book for each group" : "") +
                             (sizes.scaled ? ", scaled" : "");
    list.push_back({name, sizes});
  };
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int head_dim : {64, 128}) {
      for (const int sub_dim : {2, 4}) {
        if (!only_small_cases()) add({dtype, head_dim, sub_dim, 8192, 13, false, false, 2, 4, 1, sub_dim == 2 ? 40 : 9, 2});
        add({dtype, head_dim, sub_dim, 200, 8, false, true, 2, 3, 3, 5, 2});
        add({dtype, head_dim, sub_dim, 3000, 12, false, false, 1, 9, 1, 3, 1});
        add({dtype, head_dim, sub_dim, 1000, 13, false, true, 1, 8, 1, 2, 2});
        add({dtype, head_dim, sub_dim, 500, 16, false, false, 3, 1, 1, 2, 1});
        add({dtype, head_dim, sub_dim, 100, 7, false, true, 1, 4, 2, 2, 1});
      }
    }
    add({dtype, 80, 4, 77, 7, false, false, 2, 5, 1, 3, 2});
    add({dtype, 96, 4, 31, 5, true, true, 2, 2, 1, 3, 2});
    add({dtype, 128, 8, 300, 9, false, false, 1, 4, 1, 3, 1});
    add({dtype, 64, 2, 40, 13, true, false, 1, 4, 1, 3, 1});
    add({dtype, 15, 3, 9, 4, false, true, 1, 1, 2, 2, 1});
    add({dtype, 7, 1, 3, 2, false, false, 2, 2, 1, 2, 1});
    add({dtype, 512, 4, 17, 5, false, false, 1, 1, 1, 1, 1});
  }
  return list;
}

// Encodes, decodes and scores on the GPU. `test` gets what the kernels wrote.
Status run_on_gpu(CodedCase& test) {
  DeviceBuffer<uint16_t> centroids(test.centroids);
  DeviceBuffer<float> scales(test.scales), scores(test.scores), ranges(test.ranges);
  DeviceBuffer<uint32_t> index(test.index);
  DeviceBuffer<uint8_t> keys(test.keys), codes(test.codes), decoded(test.decoded), queries(test.queries);
  DeviceBuffer<int32_t> from(test.from), to(test.to), heads(test.heads), table(test.table), counts(test.counts),
      slots(test.slot_numbers), starts(test.query_start);
  const auto move = [&](CodedKeys& k) {
    k.codes = reinterpret_cast<uint32_t*>(codes.get());
    k.centroids = centroids.get();
    if (k.channel_scale != nullptr) k.channel_scale = scales.get();
  };
  EncodeKeysArguments there = test.encoding();
  move(there);
  there.keys = keys.get();
  there.from = from.get();
  there.to = to.get();
  there.heads = heads.get();
  there.index = reinterpret_cast<const uint8_t*>(index.get());
  DecodeKeysArguments back = test.decoding();
  move(back);
  back.keys = decoded.get();
  back.from = to.get();
  back.to = from.get();
  back.heads = heads.get();
  CodedKeyScoresArguments scored = test.scoring();
  move(scored.coded);
  scored.query_start = starts.get();
  scored.slots = slots.get();
  scored.block_table = table.get();
  scored.key_counts = counts.get();
  scored.query = queries.get();
  scored.scores = scores.get();
  scored.ranges = ranges.get();
  Status status = launch_for_python(encode_keys, there, nullptr);
  if (status.ok()) status = launch_for_python(decode_keys, back, nullptr);
  if (status.ok()) status = launch_for_python(coded_key_scores, scored, nullptr);
  if (status.ok()) status = cuda_status(cudaDeviceSynchronize());
  if (!status.ok()) return status;
  test.codes = codes.host();
  test.decoded = decoded.host();
  test.scores = scores.host();
  test.ranges = ranges.host();
  return status;
}

Outcome compare(const Case& given, Random& random) {
  CodedCase here = CodedCase::random(random, given.sizes);
  CodedCase there = here;
  Outcome outcome;
  outcome.expect(here.run_on_cpu(best_isa(), 8), "the CPU fails");
  const Status status = run_on_gpu(there);
  outcome.expect(status.ok(), status.message);
  outcome.expect(there.codes == here.codes, "codes differ from the CPU's");
  outcome.expect(there.decoded_numbers() == here.decoded_numbers(), "decoded keys differ from the CPU's");
  const bool tensor_cores = cuda::fits_coded_key_scores(there.scoring());
  const int64_t wrong = there.wrong_scores(tensor_cores ? 0x1p-11 : 0.0);
  outcome.expect(wrong == 0, std::to_string(wrong) + " scores are wrong");
  outcome.expect(here.wrong_scores(0.0) == 0, "scores of the CPU are wrong");
  outcome.expect(there.wrong_ranges() == 0 && here.wrong_ranges() == 0, "ranges are not those of the scores");
  outcome.expect(fault_for_python()->code == 0, "a fault was reported");
  return outcome;
}

// Many sub-vectors of four dims, by how their dims are drawn.
struct Odd {
  std::string name;
  DType dtype;
  float (*centroid)(Random&);
  float (*key)(Random&);
};

std::vector<Odd> odd_cases() {
  std::vector<Odd> list;
  const auto normal = [](Random& random) { return std::normal_distribution<float>()(random); };
  const auto whole = [](Random& random) { return static_cast<float>(pick(random, -2, 2)); };
  const auto none = [](Random&) { return 0.75f; };
  const auto huge = [](Random& random) {
    return std::normal_distribution<float>()(random) * pick_from(random, {1.0f, 1.0f, 1.0f, 1e5f, 1e19f, 1e38f, INFINITY});
  };
  const auto tiny = [](Random& random) { return std::normal_distribution<float>()(random) * 1e-6f; };
  const auto shifted = [](Random& random) { return 100 + std::normal_distribution<float>()(random) / 8; };
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    list.push_back({"equally near centroids", dtype, whole, whole});
    list.push_back({"equal keys", dtype, normal, none});
    list.push_back({"equal centroids", dtype, none, normal});
    list.push_back({"huge keys", dtype, normal, huge});
    list.push_back({"tiny keys and centroids", dtype, tiny, tiny});
    list.push_back({"far from zero", dtype, shifted, shifted});
  }
  return list;
}

Outcome compare_codes(const Odd& given, Random& random) {
  const CodedSizes sizes{given.dtype, 128, 4, 1000, 13, false, false, 2, 1, 1, 8, 1};
  CodedCase here = CodedCase::random(random, sizes);
  for (uint16_t& number : here.centroids) number = elements::float_to_half(given.centroid(random));
  here.index_books(best_isa(), 2);
  const auto count = static_cast<int64_t>(here.keys.size() / byte_size(sizes.dtype));
  for (int64_t i = 0; i < count; ++i) write_element(sizes.dtype, here.keys, i, given.key(random));
  CodedCase there = here;
  Outcome outcome;
  outcome.expect(here.run_on_cpu(best_isa(), 8), "the CPU fails");
  const Status status = run_on_gpu(there);
  outcome.expect(status.ok(), status.message);
  outcome.expect(there.codes == here.codes, "codes differ from the CPU's");
  return outcome;
}

// What is wrong in the tables is reported, and nothing is read there.
void reports(const char* name, PagedFault fault, void (*spoil)(CodedCase&)) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::f16}) {
    CodedCase test = CodedCase::random(random, {dtype, 64, 2, 200, 8, false, false, 2, 3, 1, 5, 2});
    spoil(test);
    CHECK(run_on_gpu(test).ok());
    check(fault_for_python()->code == static_cast<int32_t>(fault), name, __FILE__, __LINE__);
    *fault_for_python() = Fault{};
  }
}

}  // namespace

TEST("coded-keys: encode-keys, decode-keys and coded-key-scores give what the CPU gives") { run_cases(all_cases(), compare); }

TEST("coded-keys: encode-keys finds what the CPU finds, of odd sub-vectors") { run_cases(odd_cases(), compare_codes); }

TEST("coded-key-scores reports tables that lead outside") {
  reports("a block too far", PagedFault::block_out_of_range, [](CodedCase& test) { test.table[0] = 1 << 20; });
  reports("a block below zero", PagedFault::block_out_of_range, [](CodedCase& test) { test.table[0] = -7; });
  reports("part of a block", PagedFault::part_of_block, [](CodedCase& test) { test.counts[0] = 65; });
  reports("too many keys", PagedFault::cache_overflow, [](CodedCase& test) { test.counts[1] = 64000; });
  reports("a slot too far", PagedFault::slot_out_of_range, [](CodedCase& test) { test.slot_numbers[0] = 2; });
  reports("rows that descend", PagedFault::rows_not_ascending, [](CodedCase& test) { test.query_start[1] = 99; });
}

}  // namespace kv::tests

namespace {

// `sizes`: kv heads, head dim, sub-vector's dims, centroids, bits. `pointers`: codes, centroids.
kv::CodedKeys coded_keys_for_python(const int64_t* sizes, void* const* pointers, int64_t blocks) {
  kv::CodedKeys k;
  k.block_count = static_cast<int32_t>(blocks);
  k.kv_heads = static_cast<int32_t>(sizes[0]);
  k.head_dim = static_cast<int32_t>(sizes[1]);
  k.sub_dim = static_cast<int32_t>(sizes[2]);
  k.centroid_count = static_cast<int32_t>(sizes[3]);
  k.code_bits = static_cast<int32_t>(sizes[4]);
  k.codes = static_cast<uint32_t*>(pointers[0]);
  k.centroids = static_cast<const uint16_t*>(pointers[1]);
  return k;
}

}  // namespace

// For torch-hcattn.py, contiguous f16 tensors; these return 0, or print why not.

// Bytes of the index of one book, of `sizes` centroids and dims of a sub-vector.
KV_FOR_PYTHON int64_t kv_centroid_index_bytes(const int64_t* sizes) {
  return kv::IndexShape(static_cast<int>(sizes[0]), static_cast<int>(sizes[1])).bytes();
}

// Fills in the indices of books, all in host memory. `sizes`: centroids, dims of a sub-vector, books.
KV_FOR_PYTHON void kv_index_centroids(const int64_t* sizes, void* const* pointers) {
  kv::IndexCentroidsArguments arguments;
  arguments.centroids = static_cast<const uint16_t*>(pointers[0]);
  arguments.index = static_cast<uint8_t*>(pointers[1]);
  arguments.centroid_count = static_cast<int32_t>(sizes[0]);
  arguments.sub_dim = static_cast<int32_t>(sizes[1]);
  arguments.books = sizes[2];
  kv::Workers workers(8);
  kv::ExecutionContext context{workers};
  context.isa = kv::best_isa();
  kv::index_centroids_cpu(arguments, context);
}

// `sizes`: those of coded_keys_for_python, then copies, which are all blocks. `pointers`: codes, centroids, keys, index, from, to, kv heads.
KV_FOR_PYTHON int kv_encode_keys(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::EncodeKeysArguments arguments;
  static_cast<kv::CodedKeys&>(arguments) = coded_keys_for_python(sizes, pointers, sizes[5]);
  arguments.copies = static_cast<int32_t>(sizes[5]);
  arguments.keys = pointers[2];
  arguments.dtype = kv::DType::f16;
  arguments.token_stride = sizes[1];
  arguments.block_stride = kv::kCodedBlockTokens * sizes[1];
  arguments.index = static_cast<const uint8_t*>(pointers[3]);
  arguments.from = static_cast<const int32_t*>(pointers[4]);
  arguments.to = static_cast<const int32_t*>(pointers[5]);
  arguments.heads = static_cast<const int32_t*>(pointers[6]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::encode_keys, arguments, stream));
}

// One row of one slot. `sizes`: those of coded_keys_for_python, then query heads, blocks of a kv head, parts of ranges or 0.
// `pointers`: codes, centroids, query, scores, table, counts, slots, query start, and ranges where they have parts.
KV_FOR_PYTHON int kv_coded_key_scores(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::CodedKeyScoresArguments arguments;
  arguments.coded = coded_keys_for_python(sizes, pointers, sizes[0] * sizes[6]);
  arguments.batch = arguments.slot_count = arguments.query_tokens = 1;
  arguments.kv_heads = static_cast<int32_t>(sizes[0]);
  arguments.head_dim = static_cast<int32_t>(sizes[1]);
  arguments.query_heads = static_cast<int32_t>(sizes[5]);
  arguments.table_width = static_cast<int32_t>(sizes[6]);
  arguments.block_count = arguments.kv_heads * arguments.table_width;
  arguments.query = pointers[2];
  arguments.query_head_stride = sizes[1];
  arguments.query_token_stride = sizes[1] * sizes[5];
  arguments.query_dtype = kv::DType::f16;
  arguments.scores = static_cast<float*>(pointers[3]);
  arguments.score_head_stride = kv::kCodedBlockTokens * sizes[6];
  arguments.score_token_stride = arguments.score_head_stride * sizes[5];
  arguments.block_table = static_cast<const int32_t*>(pointers[4]);
  arguments.key_counts = static_cast<int32_t*>(pointers[5]);
  arguments.slots = static_cast<const int32_t*>(pointers[6]);
  arguments.query_start = static_cast<const int32_t*>(pointers[7]);
  arguments.scale = scale;
  arguments.range_parts = static_cast<int32_t>(sizes[7]);
  if (sizes[7] > 0) arguments.ranges = static_cast<float*>(pointers[8]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::coded_key_scores, arguments, stream));
}
