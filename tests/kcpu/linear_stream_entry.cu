// Entry points for ctypes: the streaming product under the shim.
#include "linear_stream.cu"
#include "launch.h"

KCPU_ENTRY(linear_stream)
KCPU_ENTRY(linear_stream_f32)
