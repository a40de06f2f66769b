// Entry points for ctypes: sampling under the shim.
#include "sample.cu"
#include "launch.h"

extern "C" int cpu_params_bytes() { return sizeof(Params); }
extern "C" int cpu_shared_bytes() { return sizeof(Shared); }
KCPU_ENTRY(sample)
extern "C" void cpu_philox(const uint32_t* counter, const uint32_t* key, uint32_t* words) {  // counter[3] is always "TOKN"
  const uint4 w = philox(counter[0], (uint64_t)counter[2] << 32 | counter[1], (uint64_t)key[1] << 32 | key[0]);
  for (int j = 0; j < 4; ++j) words[j] = comp(w, j);
}
extern "C" void cpu_arithmetic(const float* x, int n, float* log_of, uint64_t* mass_of) {
  for (int i = 0; i < n; ++i) { log_of[i] = log_exact(x[i]); mass_of[i] = mass(x[i]); }
}
extern "C" void cpu_exponential(const uint32_t* word, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = exponential(word[i]);
}
