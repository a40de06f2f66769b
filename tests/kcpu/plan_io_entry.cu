// Entry points for ctypes: plans in and results out under the shim.
#include "plan_io.cu"
#include "launch.h"

extern "C" int cpu_read_bytes() { return sizeof(ReadParams); }
extern "C" int cpu_publish_bytes() { return sizeof(PublishParams); }
KCPU_ENTRY(plan_read)
KCPU_ENTRY(block_rows)
KCPU_ENTRY(publish)
