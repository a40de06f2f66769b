// Entry points for ctypes: private pages of draft trees under the shim.
#include "tree_paths.cu"
#include "launch.h"

KCPU_ENTRY(path_plan)
KCPU_ENTRY(path_copy)
