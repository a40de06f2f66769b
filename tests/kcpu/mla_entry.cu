// Entry points for ctypes: tree attention under the shim. Blocks wait for one another at the end, so there is one.
#ifdef OCTETS
#include "tree_mla.cu"
#else
#include "tree_mla_rows.cu"
#endif
#include "launch.h"

extern "C" int cpu_params_bytes() { return sizeof(Params); }
extern "C" int cpu_plan_bytes() { return sizeof(PlanParams); }
extern "C" int cpu_item_bytes() { return sizeof(Item); }
extern "C" void cpu_tree_mla_plan(const PlanParams* p) {
  kcpu::launch({1, 1, 1}, {256, 1, 1}, 0, [=] { tree_mla_plan(*p); });
}
// cache_rows: rows of the cache, which the copy engine's map states on the GPU.
extern "C" void cpu_tree_mla(const Params* p, int cache_rows, size_t smem_bytes, int descending) {
  kcpu::descending = descending;
#if USE_WGMMA
  const TensorMap keys{(const char*)p->cache, cache_rows, p->box_keys}, queries{(const char*)p->q, p->last_column + 1, kN};
  kcpu::launch({1, 1, 1}, {(unsigned)kThreads, 1, 1}, smem_bytes, [=] { tree_mla(*p, keys, queries); });
#else
  (void)cache_rows;
  kcpu::launch({1, 1, 1}, {(unsigned)kThreads, 1, 1}, smem_bytes, [=] { tree_mla(*p); });
#endif
#if MERGE_LATER
  kcpu::launch({(unsigned)kMergers, 1, 1}, {256, 1, 1}, 0, [=] { tree_mla_merge(*p); });
#endif
  kcpu::descending = false;
}
KCPU_RUN(tree_mla_plan)
KCPU_RUN(tree_mla)
#if MERGE_LATER
KCPU_RUN(tree_mla_merge)
#endif
