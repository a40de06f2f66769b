// Entry points for ctypes: the MoE kernels under the shim. On the GPU the launcher supplies grid and block.
#include "moe_w4.cu"
#include "launch.h"

extern "C" int cpu_params_bytes() { return sizeof(Params); }
extern "C" void cpu_moe_w4(const Params* p, size_t smem_bytes, int descending) {
  kcpu::descending = descending;
  kcpu::launch({1, 1, 1}, {(unsigned)kThreads, 1, 1}, smem_bytes, [=] { moe_w4(*p); });
}
extern "C" void cpu_moe_combine(int rows, const void* part, const int* expert, const uint8_t* base, uint8_t* out, int top_k, int splits, int H) {
  kcpu::launch({(unsigned)(H + 1023) / 1024, (unsigned)rows, 1}, {128, 1, 1}, 0, [=] { moe_combine(part, expert, base, out, top_k, splits, H); });
}
KCPU_RUN(moe_w4)
KCPU_RUN(moe_combine)
