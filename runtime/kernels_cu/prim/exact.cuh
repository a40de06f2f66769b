// Arithmetic that must give NumPy's bits: each operation rounded to nearest on its own, never contracted into an FMA.
#pragma once
#include "memory.cuh"

namespace prim {

#ifndef KCPU
// CUDA Math API, "Single Precision Intrinsics": the compiler does not merge these.
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float round_even(float a) { return rintf(a); }
__device__ __forceinline__ float from_u32(uint32_t a) { return __uint2float_rn(a); }
// ceil(a * b) with b rounded to double, then one rounding of the product.
__device__ __forceinline__ uint64_t ceil_product(double a, uint64_t b) { return (uint64_t)ceil(__dmul_rn(a, __ull2double_rn(b))); }
__device__ __forceinline__ uint32_t mul_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
__device__ __forceinline__ uint32_t add_shared(uint32_t* at, uint32_t v) { return atomicAdd(at, v); }
__device__ __forceinline__ void or_shared(uint32_t* at, uint32_t v) { atomicOr(at, v); }
__device__ __forceinline__ void raise_to(uint32_t* at, uint32_t v) { atomicMax(at, v); }
#else
// The shim is built for x86-64 without FMA, so plain operators round one by one.
inline float add_rn(float a, float b) { return a + b; }
inline float sub_rn(float a, float b) { return a - b; }
inline float mul_rn(float a, float b) { return a * b; }
inline float div_rn(float a, float b) { return a / b; }
inline float round_even(float a) { return rintf(a); }
inline float from_u32(uint32_t a) { return (float)a; }
inline uint64_t ceil_product(double a, uint64_t b) { return (uint64_t)ceil(a * (double)b); }
inline uint32_t mul_high(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
inline uint32_t add_shared(uint32_t* at, uint32_t v) { const uint32_t before = *at; *at += v; return before; }
inline void or_shared(uint32_t* at, uint32_t v) { *at |= v; }
inline void raise_to(uint32_t* at, uint32_t v) { *at = v > *at ? v : *at; }
#endif

// -0 becomes 0, so that equal numbers have equal bits.
__device__ __forceinline__ float plus_zero(float v) { return add_rn(v, 0.f); }
// The float whose `ordered` bits these are.
__device__ __forceinline__ float unordered(uint32_t bits) { return __uint_as_float(bits ^ ((int)bits < 0 ? 0x80000000u : 0xffffffffu)); }
// 64 bits in one comparison: the larger value wins, of equals the lower id.
__device__ __forceinline__ uint64_t rank_of(float v, uint32_t id) { return (uint64_t)ordered(plus_zero(v)) << 32 | (0xffffffffu - id); }
__device__ __forceinline__ uint32_t rank_id(uint64_t rank) { return 0xffffffffu - (uint32_t)rank; }
__device__ __forceinline__ float rank_value(uint64_t rank) { return unordered((uint32_t)(rank >> 32)); }

}  // namespace prim
