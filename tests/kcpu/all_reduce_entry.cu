// Entry points for ctypes: the sum over ranks under the shim; ranks are processes, regions shared memory.
#include "all_reduce.cu"
#include "launch.h"

extern "C" long cpu_region_bytes() { return sizeof(Region); }
extern "C" long cpu_state_bytes() { return sizeof(State); }
KCPU_ENTRY(all_reduce_one)
KCPU_ENTRY(all_reduce_one_norm)
KCPU_ENTRY(all_reduce_two)
KCPU_ENTRY(all_reduce_two_norm)
