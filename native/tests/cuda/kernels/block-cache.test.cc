// The operations of a cache over two memories on CUDA against the CPU's, bit for bit: what blocks are scored by, scores, the
// chosen blocks, plans of many steps, and loads. For torch-block-cache.py.
#include <cmath>
#include <string>
#include <vector>

#include "kernels/block-metadata/block-metadata.h"
#include "kernels/block-scores/block-scores.h"
#include "kernels/fetch-blocks/fetch-blocks.h"
#include "kernels/plan-blocks/plan-blocks.h"
#include "kernels/select-top-blocks/select-top-blocks.h"
#include "runtime/device.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::baseline {
void block_metadata(const BlockMetadataArguments& arguments, Workers& workers);
void block_scores(const BlockScoresArguments& arguments, Workers& workers);
void select_top_blocks(const SelectTopBlocksArguments& arguments, Workers& workers);
void plan_blocks(const PlanBlocksArguments& arguments, Workers& workers);
}  // namespace kv::baseline

namespace kv::tests {
namespace {

struct Case {
  std::string name;
  int most_blocks;  // of a sequence
};

std::vector<Case> cases(int count, int small, int large) {
  std::vector<Case> list;
  const int all = only_small_cases() ? 4 : count;
  for (int i = 1; i <= all; ++i) {
    const int most = !only_small_cases() && i % 4 == 0 ? large : small;
    list.push_back({"up to " + std::to_string(most) + " blocks, " + std::to_string(i), most});
  }
  return list;
}

// Contents that the CPU and the device each have a copy of.
template <class T>
struct Twice {
  std::vector<T> host;
  DeviceBuffer<T> device;

  explicit Twice(std::vector<T> contents) : host(std::move(contents)), device(host) {}

  bool same() const {
    const std::vector<T> found = device.host();
    return std::memcmp(found.data(), host.data(), host.size() * sizeof(T)) == 0;
  }
};

// Arguments that name memory of the device or of the host.
template <class T>
T* place(const Twice<T>& from, bool on_device) {
  return on_device ? from.device.get() : const_cast<T*>(from.host.data());
}

// Sequences of random lengths, their blocks, and which of them have rows.
struct Sequences {
  int kv_heads, block_tokens, width, slot_count, rows = 0;
  std::vector<int32_t> starts{0}, order, counts, numbers;

  Sequences(int most_blocks, int most_rows, Random& random)
      : kv_heads(pick(random, 1, 4)),
        block_tokens(pick_from(random, {1, 16, 32})),
        width(pick(random, (most_blocks + 1) / 2, most_blocks)),
        slot_count(pick(random, 1, 4)) {
    order = shuffled(slot_count, random);
    order.resize(static_cast<size_t>(pick(random, 1, slot_count)));
    for (size_t entry = 0; entry < order.size(); ++entry) starts.push_back(starts.back() + pick(random, entry == 0 ? 1 : 0, most_rows));
    rows = starts.back() + pick(random, 0, 1);
    for (int i = 0; i < slot_count * kv_heads; ++i) {
      counts.push_back(pick_from(random, {1, block_tokens, width * block_tokens, pick(random, 1, width * block_tokens)}));
    }
    numbers = shuffled(slot_count * kv_heads * width, random);
  }
};

struct PlacedSequences {
  const Sequences& own;
  Twice<int32_t> starts, order, counts, numbers;
  explicit PlacedSequences(const Sequences& given)
      : own(given), starts(given.starts), order(given.order), counts(given.counts), numbers(given.numbers) {}

  void describe(PagedBatch& batch, bool on_device) const {
    batch.batch = static_cast<int32_t>(own.order.size());
    batch.kv_heads = own.kv_heads;
    batch.query_start = place(starts, on_device);
    batch.query_tokens = own.rows;
    batch.slots = place(order, on_device);
    batch.block_tokens = own.block_tokens;
    batch.block_count = own.slot_count * own.kv_heads * own.width;
    batch.block_table = place(numbers, on_device);
    batch.table_width = own.width;
    batch.key_counts = place(counts, on_device);
    batch.slot_count = own.slot_count;
  }
};

std::vector<uint8_t> random_elements(DType dtype, int64_t count, Random& random, bool odd) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * byte_size(dtype));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) {
    write_element(dtype, bytes, i, odd && pick(random, 0, 2000) == 0 ? pick_from(random, {NAN, 0.0f, -0.0f}) : normal(random));
  }
  return bytes;
}

// Whether two buffers hold the same elements; any NaN is any other.
bool same_elements(DType dtype, const std::vector<uint8_t>& one, const std::vector<uint8_t>& other) {
  for (int64_t i = 0; i < static_cast<int64_t>(one.size() / byte_size(dtype)); ++i) {
    const float x = read_element(dtype, one, i), y = read_element(dtype, other, i);
    if (x != y && !(std::isnan(x) && std::isnan(y))) return false;
  }
  return true;
}

Outcome describe_blocks(const Case& test, Random& random) {
  const Sequences sequences(test.most_blocks, 3 * 32, random);
  const PlacedSequences placed(sequences);
  const DType dtype = pick_from(random, {DType::f16, DType::bf16, DType::f32});
  const int dim = pick_from(random, {1, 40, 64, 128, 200});
  const auto method = static_cast<BlockMetadataMethod>(pick(random, 0, 2));
  const int64_t blocks = int64_t{sequences.slot_count} * sequences.kv_heads * sequences.width;
  const Twice<uint8_t> keys(random_elements(dtype, blocks * sequences.block_tokens * dim, random, true));
  const Twice<uint8_t> values(random_elements(dtype, blocks * sequences.block_tokens * dim, random, false));
  Twice<uint32_t> checksums(std::vector<uint32_t>(static_cast<size_t>(blocks), 7));
  const bool checked = pick(random, 0, 1) == 0;
  Twice<uint8_t> metadata(std::vector<uint8_t>(static_cast<size_t>(blocks * metadata_vectors(method) * dim) * byte_size(dtype), 7));
  const Twice<int32_t> table(shuffled(static_cast<int>(blocks), random));
  const auto arguments = [&](bool on_device) {
    BlockMetadataArguments a;
    placed.describe(a, on_device);
    a.cache_dtype = dtype;
    a.head_dim = dim;
    a.token_stride = dim;
    a.block_stride = int64_t{dim} * sequences.block_tokens;
    a.keys = place(keys, on_device);
    a.metadata_table = place(table, on_device);
    a.metadata = place(metadata, on_device);
    a.metadata_blocks = static_cast<int32_t>(blocks);
    a.method = method;
    if (!checked) return a;
    a.values = place(values, on_device);
    a.checksums = place(checksums, on_device);
    return a;
  };
  succeeds(launch_for_python(block_metadata, arguments(true), nullptr));
  succeeds(cudaDeviceSynchronize());
  Workers workers(2);
  baseline::block_metadata(arguments(false), workers);
  Outcome outcome;
  outcome.expect(same_elements(dtype, metadata.device.host(), metadata.host), "other metadata than the CPU");
  outcome.expect(checksums.same(), "other checksums than the CPU");
  return outcome;
}

Outcome score_blocks(const Case& test, Random& random) {
  const Sequences sequences(test.most_blocks, 2, random);
  const PlacedSequences placed(sequences);
  const DType dtype = pick_from(random, {DType::f16, DType::f16, DType::bf16, DType::f32});
  const DType query_dtype = pick_from(random, {DType::f16, DType::f16, DType::bf16, DType::f32});
  const int dim = pick_from(random, {64, 64, 128, 128, 128, 40, 256, 300}), vectors = pick(random, 1, 2);
  const int group = pick_from(random, {1, 2, 3, 4, 4, 6, 8});
  const int64_t blocks = int64_t{sequences.slot_count} * sequences.kv_heads * sequences.width;
  const int64_t score_stride = sequences.width + pick(random, 0, 3);
  const Twice<uint8_t> query(random_elements(query_dtype, int64_t{sequences.rows} * sequences.kv_heads * group * dim, random, true));
  const Twice<uint8_t> metadata(random_elements(dtype, blocks * vectors * dim, random, true));
  Twice<float> scores(std::vector<float>(static_cast<size_t>(sequences.rows * sequences.kv_heads * score_stride), -7));
  const auto arguments = [&](bool on_device) {
    BlockScoresArguments a;
    placed.describe(a, on_device);
    a.cache_dtype = dtype;
    a.head_dim = dim;
    a.query = place(query, on_device);
    a.query_dtype = query_dtype;
    a.query_heads = sequences.kv_heads * group;
    a.query_head_stride = dim;
    a.query_token_stride = int64_t{dim} * a.query_heads;
    a.metadata = place(metadata, on_device);
    a.vectors = vectors;
    a.scores = place(scores, on_device);
    a.score_head_stride = score_stride;
    a.score_token_stride = score_stride * sequences.kv_heads;
    return a;
  };
  succeeds(launch_for_python(block_scores, arguments(true), nullptr));
  succeeds(cudaDeviceSynchronize());
  Workers workers(2);
  baseline::block_scores(arguments(false), workers);
  Outcome outcome;
  outcome.expect(scores.same(), "other scores than the CPU");
  return outcome;
}

Outcome choose_blocks(const Case& test, Random& random) {
  const Sequences sequences(test.most_blocks, 1, random);
  const PlacedSequences placed(sequences);
  const int levels = pick_from(random, {0, 0, 1, 4});
  std::vector<float> drawn(static_cast<size_t>(sequences.rows * sequences.kv_heads * sequences.width));
  std::normal_distribution<float> normal;
  for (float& score : drawn) {
    score = normal(random);
    if (levels > 0) score = std::round(score * static_cast<float>(levels));
    if (pick(random, 0, 500) == 0) score = pick_from(random, {NAN, -INFINITY, INFINITY, 0.0f, -0.0f});
  }
  const Twice<float> scores(drawn);
  const int sinks = pick(random, 0, 2), recent = pick(random, 1, 3);
  const int room = sinks + recent + pick_from(random, {0, 1, 7, 64, 600});
  Twice<int32_t> chosen(std::vector<int32_t>(static_cast<size_t>(sequences.slot_count * sequences.kv_heads * room), -7));
  Twice<int32_t> counts(std::vector<int32_t>(static_cast<size_t>(sequences.slot_count * sequences.kv_heads), -7));
  std::vector<int32_t> drawn_budgets(static_cast<size_t>(sequences.slot_count));
  for (int32_t& budget : drawn_budgets) budget = pick(random, sinks + recent - 1, room + 1);
  const Twice<int32_t> budgets(drawn_budgets);
  const auto arguments = [&](bool on_device) {
    SelectTopBlocksArguments a;
    placed.describe(a, on_device);
    a.scores = place(scores, on_device);
    a.score_head_stride = sequences.width;
    a.score_token_stride = int64_t{sequences.width} * sequences.kv_heads;
    a.sink_blocks = sinks;
    a.recent_blocks = recent;
    a.room = room;
    a.budgets = place(budgets, on_device);
    a.chosen = place(chosen, on_device);
    a.chosen_counts = place(counts, on_device);
    return a;
  };
  succeeds(launch_for_python(select_top_blocks, arguments(true), nullptr));
  succeeds(cudaDeviceSynchronize());
  Workers workers(2);
  baseline::select_top_blocks(arguments(false), workers);
  Outcome outcome;
  outcome.expect(counts.same(), "other counts than the CPU");
  outcome.expect(chosen.same(), "other blocks than the CPU");
  return outcome;
}

// Lists of chosen blocks: ascending, some of them those of the step before.
void draw_lists(const Sequences& s, int room, Random& random, std::vector<int32_t>& chosen, std::vector<int32_t>& counts) {
  for (size_t head = 0; head < counts.size(); ++head) {
    const int blocks = (s.counts[head] + s.block_tokens - 1) / s.block_tokens;
    std::vector<int> order = shuffled(blocks, random);
    if (pick(random, 0, 2) != 0) std::iota(order.begin(), order.end(), 0);
    order.resize(static_cast<size_t>(pick(random, 0, std::min(room, blocks))));
    if (!order.empty() && std::find(order.begin(), order.end(), blocks - 1) == order.end()) order.back() = blocks - 1;
    std::sort(order.begin(), order.end());
    counts[head] = static_cast<int32_t>(order.size());
    std::copy(order.begin(), order.end(), chosen.begin() + static_cast<std::ptrdiff_t>(head) * room);
  }
}

Outcome plan_steps(const Case& test, Random& random) {
  Sequences sequences(test.most_blocks, 1, random);
  // Sequences that share their first blocks.
  if (sequences.slot_count > 1 && pick(random, 0, 1) == 0) {
    const auto row = static_cast<std::ptrdiff_t>(sequences.kv_heads) * sequences.width;
    std::copy(sequences.numbers.begin(), sequences.numbers.begin() + row / 2, sequences.numbers.begin() + row);
  }
  const PlacedSequences placed(sequences);
  const int heads = sequences.slot_count * sequences.kv_heads;
  const int sinks = pick(random, 0, 2), recent = pick(random, 1, 3), room = sinks + recent + pick_from(random, {0, 1, 7, 60});
  const int lists = static_cast<int>(sequences.order.size()) * sequences.kv_heads;
  const int cached = lists * room + pick_from(random, {0, 1, 100, test.most_blocks > 1000 ? 40000 : 3});
  const int host_blocks = heads * sequences.width;
  const auto numbers = [](int count, int32_t all) { return Twice<int32_t>(std::vector<int32_t>(static_cast<size_t>(count), all)); };
  Twice<int32_t> chosen = numbers(heads * room, 0), chosen_counts = numbers(heads, 0), where = numbers(host_blocks, -1);
  Twice<int32_t> holds = numbers(cached, -1), used_at = numbers(cached, 0), clock = numbers(1, 0);
  Twice<int32_t> history = numbers(heads * kWorkingSetSteps * room, 0), demand = numbers(heads * 4, 0);
  Twice<int32_t> read_table = numbers(heads * room, -7), read_counts = numbers(heads, -7), loads = numbers(2 * lists * room, -7);
  Twice<int32_t> load_count = numbers(1, -7);
  const auto arguments = [&](bool on_device) {
    PlanBlocksArguments a;
    placed.describe(a, on_device);
    a.chosen = place(chosen, on_device);
    a.chosen_counts = place(chosen_counts, on_device);
    a.room = room;
    a.sink_blocks = sinks;
    a.recent_blocks = recent;
    a.first_cached = heads * (sinks + recent);
    a.cached = cached;
    a.where = place(where, on_device);
    a.holds = place(holds, on_device);
    a.used_at = place(used_at, on_device);
    a.clock = place(clock, on_device);
    a.history = place(history, on_device);
    a.demand = reinterpret_cast<BlockDemand*>(place(demand, on_device));
    a.read_table = place(read_table, on_device);
    a.read_counts = place(read_counts, on_device);
    a.loads = place(loads, on_device);
    a.most_loads = lists * room;
    a.load_count = place(load_count, on_device);
    return a;
  };
  Workers workers(2);
  Outcome outcome;
  int64_t loaded = 0;
  for (int step = 0; step < 20 && outcome.passed; ++step) {
    draw_lists(sequences, room, random, chosen.host, chosen_counts.host);
    chosen.device.upload(chosen.host);
    chosen_counts.device.upload(chosen_counts.host);
    // Some host blocks are forgotten.
    for (int32_t& each : where.host) each = pick(random, 0, 50) == 0 ? -1 : each;
    where.device.upload(where.host);
    // Of some blocks it is long since they were chosen.
    clock.host[0] += pick_from(random, {0, 0, 0, 90, 200, 1 << 20});
    clock.device.upload(clock.host);
    succeeds(launch_for_python(plan_blocks, arguments(true), nullptr));
    succeeds(cudaDeviceSynchronize());
    baseline::plan_blocks(arguments(false), workers);
    loaded += load_count.host[0];
    outcome.expect(load_count.same(), "step " + std::to_string(step) + ": other loads than the CPU");
    if (load_count.host[0] < lists * room) loads.host = loads.device.host();  // what is behind the list is anything
    outcome.expect(read_table.same() && read_counts.same(), "step " + std::to_string(step) + ": other places than the CPU");
    outcome.expect(where.same() && holds.same() && used_at.same(), "step " + std::to_string(step) + ": another cache than the CPU");
    outcome.expect(clock.same() && history.same() && demand.same(), "step " + std::to_string(step) + ": other counts than the CPU");
  }
  outcome.detail += " " + std::to_string(loaded) + " loads";
  return outcome;
}

Outcome load_blocks(const Case& test, Random& random) {
  const int host_blocks = test.most_blocks, blocks = host_blocks / 2 + 1;
  const int64_t block_bytes = pick_from(random, {2, 48, 6 * 1024, 8 * 1024, 16 * 1024, 20 * 1024});
  const int most_loads = blocks + pick(random, 0, 5), count = pick(random, 0, blocks);
  struct Pinned {
    unsigned char* data = nullptr;
    explicit Pinned(size_t bytes) { succeeds(cudaHostAlloc(reinterpret_cast<void**>(&data), bytes, cudaHostAllocDefault)); }
    ~Pinned() { cudaFreeHost(data); }
  };
  const size_t host_bytes = static_cast<size_t>(host_blocks * block_bytes), bytes = static_cast<size_t>(blocks * block_bytes);
  const Pinned keys(host_bytes), values(host_bytes);
  for (size_t i = 0; i < host_bytes; ++i) {
    keys.data[i] = static_cast<unsigned char>(random());
    values.data[i] = static_cast<unsigned char>(random());
  }
  std::vector<int32_t> listed(static_cast<size_t>(2 * most_loads), -1);
  const std::vector<int> to = shuffled(blocks, random);
  for (int i = 0; i < count; ++i) {
    listed[static_cast<size_t>(i)] = pick(random, 0, host_blocks - 1);
    listed[static_cast<size_t>(most_loads + i)] = to[static_cast<size_t>(i)];
  }
  const DeviceBuffer<int32_t> loads(listed), load_count(std::vector<int32_t>{count});
  const DeviceBuffer<unsigned char> own_keys(bytes, 0x5a), own_values(bytes, 0x5a);
  FetchBlocksArguments a;
  a.host_keys = keys.data;
  a.host_values = values.data;
  a.keys = own_keys.get();
  a.values = own_values.get();
  a.block_bytes = block_bytes;
  a.host_blocks = host_blocks;
  a.blocks = blocks;
  a.loads = loads.get();
  a.most_loads = most_loads;
  a.load_count = load_count.get();
  succeeds(launch_for_python(fetch_blocks, a, nullptr));
  succeeds(cudaDeviceSynchronize());
  const auto wanted = [&](const unsigned char* pool) {
    std::vector<unsigned char> all(bytes, 0x5a);
    for (int i = 0; i < count; ++i) {
      std::memcpy(all.data() + listed[static_cast<size_t>(most_loads + i)] * block_bytes, pool + listed[static_cast<size_t>(i)] * block_bytes,
                  static_cast<size_t>(block_bytes));
    }
    return all;
  };
  Outcome outcome;
  outcome.expect(own_keys.host() == wanted(keys.data), "other keys than those of the host");
  outcome.expect(own_values.host() == wanted(values.data), "other values than those of the host");
  outcome.detail += " " + std::to_string(count) + " blocks of " + std::to_string(block_bytes);
  return outcome;
}

int32_t size(const int64_t* sizes, int i) { return static_cast<int32_t>(sizes[i]); }

}  // namespace

TEST("block-metadata says what the CPU says") { run_cases(cases(24, 12, 300), describe_blocks); }
TEST("block-scores are those of the CPU") { run_cases(cases(40, 40, 1500), score_blocks); }
TEST("select-top-blocks takes what the CPU takes") { run_cases(cases(40, 200, 20000), choose_blocks); }
TEST("plan-blocks plans what the CPU plans") { run_cases(cases(40, 60, 3000), plan_steps); }
TEST("fetch-blocks brings the listed blocks") { run_cases(cases(24, 40, 700), load_blocks); }

}  // namespace kv::tests

// Sequences of equal length, each with a row. sizes: sequences, query heads, kv heads, dim, blocks of a sequence, vectors,
// room, sink blocks, recent blocks, cached blocks. pointers: query, metadata, block table, key counts, slots, query start,
// scores, chosen, chosen counts, where, holds, used at, clock, history, demand, read table, read counts, loads, load count.
namespace {

template <class Arguments>
Arguments batch_for_python(const int64_t* sizes, void* const* pointers) {
  Arguments a;
  a.batch = a.slot_count = a.query_tokens = kv::tests::size(sizes, 0);
  a.kv_heads = kv::tests::size(sizes, 2);
  a.head_dim = kv::tests::size(sizes, 3);
  a.table_width = kv::tests::size(sizes, 4);
  a.block_count = a.batch * a.kv_heads * a.table_width;
  a.block_tokens = 32;
  a.cache_dtype = kv::DType::f16;
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.slots = static_cast<const int32_t*>(pointers[4]);
  a.query_start = static_cast<const int32_t*>(pointers[5]);
  return a;
}

}  // namespace

KV_FOR_PYTHON int kv_cached_block_scores(const int64_t* sizes, void* const* pointers, void* stream) {
  auto a = batch_for_python<kv::BlockScoresArguments>(sizes, pointers);
  a.query = pointers[0];
  a.query_dtype = kv::DType::f16;
  a.query_heads = kv::tests::size(sizes, 1);
  a.query_head_stride = a.head_dim;
  a.query_token_stride = int64_t{a.head_dim} * a.query_heads;
  a.metadata = pointers[1];
  a.vectors = kv::tests::size(sizes, 5);
  a.scores = static_cast<float*>(pointers[6]);
  a.score_head_stride = a.table_width;
  a.score_token_stride = int64_t{a.table_width} * a.kv_heads;
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::block_scores, a, stream));
}

KV_FOR_PYTHON int kv_select_top_blocks(const int64_t* sizes, void* const* pointers, void* stream) {
  auto a = batch_for_python<kv::SelectTopBlocksArguments>(sizes, pointers);
  a.scores = static_cast<const float*>(pointers[6]);
  a.score_head_stride = a.table_width;
  a.score_token_stride = int64_t{a.table_width} * a.kv_heads;
  a.room = kv::tests::size(sizes, 6);
  a.sink_blocks = kv::tests::size(sizes, 7);
  a.recent_blocks = kv::tests::size(sizes, 8);
  a.chosen = static_cast<int32_t*>(pointers[7]);
  a.chosen_counts = static_cast<int32_t*>(pointers[8]);
  a.budgets = static_cast<const int32_t*>(pointers[19]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::select_top_blocks, a, stream));
}

KV_FOR_PYTHON int kv_plan_blocks(const int64_t* sizes, void* const* pointers, void* stream) {
  auto a = batch_for_python<kv::PlanBlocksArguments>(sizes, pointers);
  a.room = kv::tests::size(sizes, 6);
  a.sink_blocks = kv::tests::size(sizes, 7);
  a.recent_blocks = kv::tests::size(sizes, 8);
  a.cached = kv::tests::size(sizes, 9);
  a.first_cached = a.slot_count * a.kv_heads * (a.sink_blocks + a.recent_blocks);
  a.most_loads = a.batch * a.kv_heads * a.room;
  int32_t* const* numbers = reinterpret_cast<int32_t* const*>(pointers);
  a.chosen = numbers[7];
  a.chosen_counts = numbers[8];
  a.where = numbers[9];
  a.holds = numbers[10];
  a.used_at = numbers[11];
  a.clock = numbers[12];
  a.history = numbers[13];
  a.demand = static_cast<kv::BlockDemand*>(pointers[14]);
  a.read_table = numbers[15];
  a.read_counts = numbers[16];
  a.loads = numbers[17];
  a.load_count = numbers[18];
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::plan_blocks, a, stream));
}

// sizes: bytes of a block, host blocks, blocks, room of the list. pointers: host keys, host values, keys, values, loads, load
// count.
KV_FOR_PYTHON int kv_fetch_blocks(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::FetchBlocksArguments a;
  a.block_bytes = sizes[0];
  a.host_blocks = kv::tests::size(sizes, 1);
  a.blocks = kv::tests::size(sizes, 2);
  a.most_loads = kv::tests::size(sizes, 3);
  a.host_keys = pointers[0];
  a.host_values = pointers[1];
  a.keys = pointers[2];
  a.values = pointers[3];
  a.loads = static_cast<const int32_t*>(pointers[4]);
  a.load_count = static_cast<const int32_t*>(pointers[5]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::fetch_blocks, a, stream));
}
