// Entry points for ctypes: the preparation of latent attention under the shim.
#include "mla_prep.cu"
#include "launch.h"

KCPU_ENTRY(mla_latent)
KCPU_ENTRY(query_rope)
