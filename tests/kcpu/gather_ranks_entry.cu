// Entry points for ctypes: rows gathered over ranks under the shim; ranks are processes, regions shared memory.
#include "gather_ranks.cu"
#include "launch.h"

KCPU_ENTRY(gather_ranks)
