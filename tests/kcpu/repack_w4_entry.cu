// Entry point for ctypes: repacking under the shim.
#include "repack_w4.cu"
#include "launch.h"

KCPU_ENTRY(repack_w4)
