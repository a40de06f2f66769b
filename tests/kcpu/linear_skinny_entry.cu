// Entry points for ctypes: the skinny product under the shim.
#include "linear_skinny.cu"
#include "launch.h"

KCPU_ENTRY(linear_skinny)
KCPU_ENTRY(linear_skinny_f32)
