#include "kernels/sample/sample.h"

#include <vector>

#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {

// sample(stream, logits [row, vocabulary], recent [row, recent] or undefined, output [row],
//        settings: Float64Array [row, 7] of temperature, topK, topP, minP, repetitionPenalty, seed, step,
//        outcomes [row] or undefined)
Napi::Value sample(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument logits = call.tensor(1);
  const TensorArgument recent = call.optional_tensor(2);
  const OutputArgument output = call.output(3);
  const OutputArgument outcomes = call.optional_output(5);
  SampleArguments arguments;
  arguments.logits = logits.as<float>();
  arguments.logits_stride = logits.stride(0);
  arguments.rows = logits.extent(0);
  arguments.vocabulary = logits.extent(1);
  if (recent) {
    arguments.recent = recent.as<int32_t>();
    arguments.recent_stride = recent.stride(0);
    arguments.recent_tokens = recent.extent(1);
  }
  arguments.output = output.as<int32_t>();
  if (outcomes) arguments.outcomes = outcomes.as<int32_t>();
  std::vector<SampleSettings> settings(static_cast<size_t>(arguments.rows));
  const auto* numbers = reinterpret_cast<const double*>(bytes_of(info[4], settings.size() * 7 * sizeof(double)));
  for (SampleSettings& row : settings) {
    row.temperature = static_cast<float>(numbers[0]);
    row.top_k = static_cast<int64_t>(numbers[1]);
    row.top_p = numbers[2];
    row.min_p = numbers[3];
    row.repetition_penalty = static_cast<float>(numbers[4]);
    row.seed = static_cast<uint64_t>(numbers[5]);
    row.step = static_cast<uint64_t>(numbers[6]);
    numbers += 7;
  }
  return call.enqueue("sample", [arguments, settings](ExecutionContext& context) {
    SampleArguments with_settings = arguments;
    with_settings.settings = settings.data();
    return sample(with_settings, context);
  });
}

}  // namespace kv
