// Entry points for ctypes: tree attention under the shim. Blocks wait for one another at the end, so there is one.
#include "tree_mla.cu"

extern "C" int cpu_params_bytes() { return sizeof(Params); }
extern "C" int cpu_plan_bytes() { return sizeof(PlanParams); }
extern "C" int cpu_item_bytes() { return sizeof(Item); }
extern "C" void cpu_tree_mla_plan(const PlanParams* p) {
  kcpu::launch({1, 1, 1}, {256, 1, 1}, 0, [=] { tree_mla_plan(*p); });
}
extern "C" void cpu_tree_mla(const Params* p, size_t smem_bytes, int descending) {
  kcpu::descending = descending;
  kcpu::launch({1, 1, 1}, {(unsigned)kThreads, 1, 1}, smem_bytes, [=] { tree_mla(*p); });
  kcpu::descending = false;
}
