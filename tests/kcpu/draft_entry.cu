// Entry points for ctypes: the drafter's small ops under the shim.
#include "draft.cu"
#include "launch.h"

extern "C" int cpu_room_bytes() { return sizeof(SelectRoom); }
KCPU_ENTRY(head_norm_rope)
KCPU_ENTRY(kv_write)
KCPU_ENTRY(top_logprobs)
