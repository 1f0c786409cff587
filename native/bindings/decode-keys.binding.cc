#include "kernels/decode-keys/decode-keys.h"

#include "bindings/coded-keys.h"

namespace kv {

// decodeKeys(stream, keys [block, blockToken, dim], codedKeys [codedBlock, byte], centroids [kvHead, book, centroid, subDim],
//            channelScale [kvHead, dim] or undefined, codeBits, copies [from | to | kvHead, copy])
Napi::Value decode_keys(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  DecodeKeysArguments arguments;
  describe_copies(call, 1, arguments);
  arguments.keys = call.output(1).data;
  return call.enqueue("decodeKeys", [arguments](ExecutionContext& context) { return decode_keys(arguments, context); });
}

}  // namespace kv
