#include "kernels/encode-keys/encode-keys.h"

#include "bindings/coded-keys.h"

namespace kv {

// encodeKeys(stream, keys [block, blockToken, dim], codedKeys [codedBlock, byte], centroids [kvHead, book, centroid, subDim],
//            channelScale [kvHead, dim] or undefined, codeBits, copies [from | to | kvHead, copy], index [kvHead, book, byte])
Napi::Value encode_keys(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  EncodeKeysArguments arguments;
  describe_copies(call, 1, arguments);
  arguments.codes = call.output(2).as<uint32_t>();
  arguments.index = call.tensor(7).as<uint8_t>();
  return call.enqueue("encodeKeys", [arguments](ExecutionContext& context) { return encode_keys(arguments, context); });
}

}  // namespace kv
