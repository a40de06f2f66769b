// Entry points for ctypes: routing and sorting under the shim.
#include "moe_route.cu"
#include "launch.h"

extern "C" void cpu_moe_sort(const int* expert, const float* weight, int choices, int E, const Sorted* s, int descending) {
  kcpu::descending = descending;
  kcpu::launch({1, 1, 1}, {(unsigned)kThreads, 1, 1}, 0, [=] { moe_sort(expert, weight, choices, E, *s); });
}
extern "C" void cpu_moe_route_sort(const float* logits, const float* bias, const int* live, int* expert, float* weight, float scale, int M, int E, int top_k,
                                   const Sorted* s, int descending) {
  kcpu::descending = descending;
  kcpu::launch({M <= 16 ? 1u : (unsigned)(M + 3) / 4, 1, 1}, {(unsigned)kThreads, 1, 1}, 0,
               [=] { moe_route_sort(logits, bias, live, expert, weight, scale, M, E, top_k, *s); });
}
KCPU_RUN(moe_sort)
KCPU_RUN(moe_route_sort)
