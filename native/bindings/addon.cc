#include <napi.h>

namespace {

Napi::Object Init(Napi::Env, Napi::Object exports) { return exports; }

}  // namespace

NODE_API_MODULE(kv, Init)
