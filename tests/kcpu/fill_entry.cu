// Entry points for ctypes: weights from a hash under the shim.
#include "fill.cu"
#include "launch.h"

KCPU_ENTRY(hash_bf16)
KCPU_ENTRY(hash_f32)
KCPU_ENTRY(hash_i32)
