// Entry points for ctypes: sampling over ranks under the shim; ranks are processes, regions shared memory.
#include "sample_ranks.cu"
#include "launch.h"

extern "C" long cpu_region_bytes() { return sizeof(Region); }
extern "C" long cpu_state_bytes() { return sizeof(State); }
extern "C" long cpu_shared_bytes() { return sizeof(Shared); }
KCPU_ENTRY(sample_ranks)
