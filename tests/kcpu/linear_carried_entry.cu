// Entry points for ctypes: the streaming product under the shim, x carried or not.
#include "linear_carried.cu"
#include "launch.h"

KCPU_ENTRY(linear_stream)
KCPU_ENTRY(linear_stream_f32)
#if CARRIED
KCPU_ENTRY(linear_carried)
KCPU_ENTRY(linear_carried_f32)
#endif
