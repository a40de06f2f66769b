// Entry point for ctypes: long chunks under the shim.
#include "chunk_plan.cu"
#include "launch.h"

KCPU_ENTRY(split_chunks)
