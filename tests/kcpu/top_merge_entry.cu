// Entry points for ctypes: the merge of ranks' likeliest tokens under the shim.
#include "top_merge.cu"
#include "launch.h"

KCPU_ENTRY(top_pack)
KCPU_ENTRY(top_merge)
KCPU_ENTRY(side_by_side)
