// Entry points for ctypes: the ops between the products under the shim.
#include "dense.cu"
#include "launch.h"

KCPU_ENTRY(embed)
KCPU_ENTRY(rms_norm)
KCPU_ENTRY(add_rms_norm)
KCPU_ENTRY(silu_mul)
KCPU_ENTRY(copy_rows)
KCPU_ENTRY(gather_rows)
KCPU_ENTRY(kv_move)
