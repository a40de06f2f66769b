// What every prim needs: fixed-width integers, 16-byte vectors, shared-memory addresses.
//
// The same kernels compile for the GPU (NVRTC) and for the CPU (g++ -DKCPU, tests/kcpu), where a CUDA thread is a fiber.
// A shared address is opaque: add bytes to it, nothing else. On the GPU it is 32 bits wide, on the CPU a pointer.
#pragma once

#ifdef KCPU
#include "kcpu.h"
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

namespace prim {

#ifdef KCPU
typedef char* smem_t;
inline smem_t smem(const void* pointer) { return (char*)pointer; }
#else
typedef uint32_t smem_t;
// The address in the shared window. PTX ISA, "cvta".
__device__ __forceinline__ smem_t smem(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }
#endif

__device__ __forceinline__ uint32_t comp(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

}  // namespace prim

// The dynamic part of shared memory, filled with NaN bits by the CPU shim.
#ifdef KCPU
#define DYNAMIC_SMEM(name) unsigned char* name = (unsigned char*)kcpu::dynamic_smem
#else
#define DYNAMIC_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#endif
