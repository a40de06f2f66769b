// Entry point for ctypes: long chunks under the shim.
#include "chunk_expand.cu"
#include "launch.h"

KCPU_ENTRY(chunk_expand)
