// Entry points for ctypes: the drafter's attention under the shim.
#include "block_attention.cu"
#include "launch.h"

KCPU_ENTRY(block_attention_part)
KCPU_ENTRY(block_attention_merge)
