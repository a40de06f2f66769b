// mla_entry.cu, and its kernel for Hopper as a launch: copies by maps that the caller makes.
#include "mla_entry.cu"
#if USE_WGMMA
KCPU_RUN(tree_mla)
#endif
