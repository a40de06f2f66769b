// CUDA C++ on the CPU: the kernels of runtime/kernels_cu compiled as ordinary C++ (-DKCPU), for tests without a GPU.
//
// Supplies the CUDA keywords as macros, threadIdx and friends, vector types, __syncthreads, warp collectives, named barriers,
// mbarriers, and kcpu::launch.
//
// Blocks run one after the other, so a kernel whose blocks wait for one another must be launched with one block, or as a cluster:
// its blocks run as one, with one shared memory and one __syncthreads. Inside a block every CUDA thread is a fiber: a stack of its own, switched to by hand. A fiber runs until it meets a barrier or a
// warp collective and then yields to the next one, in ascending thread order, or descending where the launch says so (a
// missing barrier often shows in one order only). There are no races and no asynchronous copies here, but
// bytes are counted where a barrier expects them; compute-sanitizer on a GPU looks for the rest.
//
// One launch of a library at a time, or it aborts. One translation unit a shared library, linked with -fno-gnu-unique: else the
// dynamic linker would give all libraries of a process one set of these variables. x86-64 Linux only.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace kcpu {

// ---------------------------------------------------------------- state of the launch in progress

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct Fiber {
  void* stack_pointer = nullptr;  // valid while the fiber is switched out
  Dim3 thread_idx, block_idx;
  int linear_index = 0;           // x + block.x * (y + block.y * z), after those of the cluster's blocks before
  bool done = false;              // the kernel function has returned
};

constexpr int WARP_SIZE = 32;
constexpr int MAX_LANE_BYTES = 256;           // largest value that a lane may pass to, or take from, a collective
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 << 10;     // for each fiber; frames with red zones are some times larger
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t GUARD_BYTES = 4096;          // of a stack's lowest bytes: who overflows it faults
constexpr size_t SMEM_ALIGNMENT = 1024;       // enough for every swizzle
constexpr long SPIN_LIMIT = 1000000;          // switches without progress before a wait is called a deadlock

// Meeting place of one warp: what every lane brought, what every lane takes away.
struct Warp {
  unsigned generation = 0;                    // counts completed rendezvous
  unsigned arrived = 0;
  alignas(16) char in[WARP_SIZE][MAX_LANE_BYTES];
  alignas(16) char out[WARP_SIZE][MAX_LANE_BYTES];
};

inline Dim3 block_idx;                        // the first of the cluster
inline Dim3 block_dim;
inline Dim3 grid_dim;

inline std::vector<Fiber> fibers;             // of the block in progress, by linear index
inline std::vector<Warp> warps;
inline int current = 0;                       // the fiber that runs now
inline int live = 0;                          // fibers that have not returned yet
inline void* launcher_stack_pointer = nullptr;
inline std::function<void()>* kernel_body = nullptr;
inline char* dynamic_smem = nullptr;          // the launch's dynamic shared memory
inline char* stacks_at = nullptr;             // the fibers' stacks, one after the other
inline size_t stacks_bytes = 0;

inline bool descending = false;               // the order in which fibers take turns

struct NamedBarrier {
  unsigned generation = 0;
  int arrived = 0;
};
inline NamedBarrier named_barriers[16];

inline unsigned barrier_generation = 0;       // counts completed __syncthreads
inline unsigned barrier_arrived = 0;

// ---------------------------------------------------------------- fibers

// Saves the callee-saved registers on the present stack, stores the stack pointer in *save, continues on `resume`.
extern "C" void kcpu_switch(void** save, void* resume);
asm(R"(
.text
.globl kcpu_switch
kcpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

[[noreturn]] inline void abandon(const char* why) {
  fprintf(stderr, "kcpu: %s\n", why);
  std::abort();
}

[[noreturn]] inline void deadlock(const char* where) {
  fprintf(stderr, "kcpu: deadlock in %s: block (%u, %u, %u), thread %d waits\n", where, block_idx.x, block_idx.y,
          block_idx.z, fibers[current].linear_index);
  std::abort();
}

// The next fiber after `from` that has not returned; `from` itself if there is no other.
inline int next_live_fiber(int from) {
  const int count = (int)fibers.size();
  int next = from;
  do {
    if (descending) next = next ? next - 1 : count - 1;
    else next = (next + 1 == count) ? 0 : next + 1;
  } while (fibers[next].done && next != from);
  return next;
}

inline void switch_to(int next) {
  const int previous = current;
  current = next;
  kcpu_switch(&fibers[previous].stack_pointer, fibers[next].stack_pointer);
}

inline void yield() {
  const int next = next_live_fiber(current);
  if (next != current) switch_to(next);
}

// First function on every fiber's stack. It must never return, for there is nothing to return to.
inline void fiber_main() {
  (*kernel_body)();
  fibers[current].done = true;
  live--;
  if (live == 0) kcpu_switch(&fibers[current].stack_pointer, launcher_stack_pointer);
  switch_to(next_live_fiber(current));
  std::abort();
}

// Lays out a fresh stack as kcpu_switch expects it: six register slots, then the address that its `ret` takes.
inline void* fresh_stack(char* bottom) {
  const uintptr_t top = ((uintptr_t)bottom + STACK_BYTES) & ~(uintptr_t)15;
  void** slot = (void**)(top - 8);            // keeps the 16-byte alignment that the ABI wants at function entry
  *--slot = (void*)&fiber_main;
  for (int reg = 0; reg < 6; reg++) *--slot = nullptr;
  return slot;
}

// ---------------------------------------------------------------- rendezvous

inline void syncthreads() {
  const unsigned generation = barrier_generation;
  barrier_arrived++;
  if ((int)barrier_arrived >= live) {
    barrier_arrived = 0;
    barrier_generation++;
    return;
  }
  long spins = 0;
  while (barrier_generation == generation) {
    yield();
    if (++spins > SPIN_LIMIT) deadlock("__syncthreads");
  }
}

// `count` threads that name the same barrier meet.
inline void named_barrier(int id, int count) {
  NamedBarrier& b = named_barriers[id];
  const unsigned generation = b.generation;
  if (++b.arrived == count) {
    b.arrived = 0;
    b.generation++;
    return;
  }
  long spins = 0;
  while (b.generation == generation) {
    yield();
    if (++spins > SPIN_LIMIT) deadlock("a named barrier");
  }
}

// An mbarrier in its 8 bytes of shared memory: arrivals a phase, arrivals and bytes still due, number of the open phase.
struct Mbarrier {
  uint16_t arrivals, due;
  uint32_t phase : 4;
  int32_t bytes : 28;
};

inline void mbarrier_init(char* at, int arrivals) {
  *(Mbarrier*)at = {(uint16_t)arrivals, (uint16_t)arrivals, 0, 0};
}

inline void mbarrier_advance(Mbarrier& b) {
  if (b.due || b.bytes) return;
  b.due = b.arrivals;
  b.phase++;
}

inline void mbarrier_arrive(char* at) {
  Mbarrier& b = *(Mbarrier*)at;
  if (!b.due) {
    fprintf(stderr, "kcpu: an arrival too many at an mbarrier: thread %d\n", fibers[current].linear_index);
    std::abort();
  }
  b.due--;
  mbarrier_advance(b);
}

// Bytes to come, or, negative, bytes that have come.
inline void mbarrier_expect(char* at, int bytes) {
  Mbarrier& b = *(Mbarrier*)at;
  b.bytes += bytes;
  if (bytes < 0) mbarrier_advance(b);
}

inline void mbarrier_wait(char* at, unsigned parity) {
  long spins = 0;
  while ((((volatile Mbarrier*)at)->phase & 1) == parity) {
    yield();
    if (++spins > SPIN_LIMIT) deadlock("an mbarrier");
  }
}

// The last of `warp_size` lanes to arrive runs `on_last` and releases the others.
template <class OnLast>
inline void warp_rendezvous(Warp& warp, unsigned warp_size, OnLast on_last) {
  const unsigned generation = warp.generation;
  warp.arrived++;
  if (warp.arrived == warp_size) {
    on_last();
    warp.arrived = 0;
    warp.generation++;
    return;
  }
  long spins = 0;
  while (warp.generation == generation) {
    yield();
    if (++spins > SPIN_LIMIT) deadlock("a warp collective");
  }
}

// A warp collective: every lane deposits `in_bytes`, the last one to arrive runs combine(warp), which fills warp.out
// from warp.in, and every lane takes `out_bytes`. All lanes of the warp must take part.
template <class Combine>
inline void warp_collective(const void* in, int in_bytes, void* out, int out_bytes, Combine combine) {
  const int linear_index = fibers[current].linear_index;
  const int lane = linear_index % WARP_SIZE;
  const int first_thread = linear_index - lane;
  const unsigned warp_size = std::min<int>(WARP_SIZE, (int)fibers.size() - first_thread);
  Warp& warp = warps[linear_index / WARP_SIZE];

  memcpy(warp.in[lane], in, in_bytes);
  warp_rendezvous(warp, warp_size, [&] { combine(warp); });
  if (out_bytes) memcpy(out, warp.out[lane], out_bytes);
  warp_rendezvous(warp, warp_size, [] {});    // nobody may overwrite in or out before everyone has read
}

// ---------------------------------------------------------------- launch

// Static shared variables lie in one section of the library, so that they too are all ones when a block begins.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_kcpu_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_kcpu_shared[];

__attribute__((no_sanitize("address"))) inline void poison_static_smem() {
  for (volatile char* at = __start_kcpu_shared; at != __stop_kcpu_shared; at++) *at = (char)0xff;  // red zones and all
}

inline void run_block(Dim3 index, size_t smem_bytes) {
  block_idx = index;
  live = (int)fibers.size();
  barrier_arrived = 0;
  memset(dynamic_smem, 0xff, smem_bytes);     // all ones is NaN in fp32, bf16 and fp16: reading before writing shows
  poison_static_smem();
  const unsigned threads = block_dim.x * block_dim.y * block_dim.z;
  for (unsigned i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    const unsigned n = i % threads;
    fiber.linear_index = (int)i;
    fiber.thread_idx = {n % block_dim.x, (n / block_dim.x) % block_dim.y, n / (block_dim.x * block_dim.y)};
    fiber.block_idx = {index.x + i / threads, index.y, index.z};
    fiber.done = false;
    fiber.stack_pointer = fresh_stack(stacks_at + (size_t)i * STACK_BYTES);
  }
  for (NamedBarrier& b : named_barriers) b = {};
  current = 0;
  kcpu_switch(&launcher_stack_pointer, fibers[0].stack_pointer);  // comes back when the last fiber has returned
}

// Stacks of so many fibers, each above a page that nobody may touch. Pages are there once they are touched, mostly one a fiber.
struct Stacks {
  explicit Stacks(size_t threads) {
    stacks_bytes = threads * STACK_BYTES;
    stacks_at = (char*)mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stacks_at == MAP_FAILED) abandon("mmap of the stacks");
    for (size_t i = 0; i < threads; i++) {
      if (mprotect(stacks_at + i * STACK_BYTES, GUARD_BYTES, PROT_NONE)) abandon("mprotect of a guard page");
    }
  }
  ~Stacks() { munmap(stacks_at, stacks_bytes); }
};

// Runs body() once for every thread of the grid; `body` is a lambda that calls the kernel with its arguments. cluster: blocks along x.
inline void launch(Dim3 grid, Dim3 block, size_t smem_bytes, std::function<void()> body, unsigned cluster = 1) {
  static std::atomic_flag launching = ATOMIC_FLAG_INIT;
  if (launching.test_and_set()) abandon("two threads launch kernels of one library at once");
  if (grid.x % cluster) abandon("a grid that is no multiple of its clusters");
  const size_t threads = (size_t)block.x * block.y * block.z * cluster;
  grid_dim = grid;
  block_dim = block;
  kernel_body = &body;
  fibers.assign(threads, Fiber{});
  warps.assign((threads + WARP_SIZE - 1) / WARP_SIZE, Warp{});

  const Stacks stacks(threads);
  const size_t smem_room = smem_bytes ? smem_bytes : 1;
  if (posix_memalign((void**)&dynamic_smem, SMEM_ALIGNMENT, smem_room)) abandon("no memory");  // to the byte, for AddressSanitizer

  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x += cluster) run_block({x, y, z}, smem_bytes);
    }
  }
  free(dynamic_smem);
  launching.clear();
}

// As the GPU has it: an access of 2, 4, 8 or 16 bytes lies at a multiple of its width. Registers, here on a stack, have no address there.
inline void check_aligned(const void* at, size_t bytes) {
  const bool single = bytes && bytes <= 16 && (bytes & (bytes - 1)) == 0;
  if (!single || ((uintptr_t)at & (bytes - 1)) == 0 || (size_t)((const char*)at - stacks_at) < stacks_bytes) return;
  fprintf(stderr, "kcpu: %zu bytes at %p: thread %d\n", bytes, at, fibers[current].linear_index);
  abandon("a misaligned access");
}

}  // namespace kcpu

// What the references of the prims call: they copy as many bytes as the instruction moves.
namespace prim {
template <class To, class From> inline void* memcpy(To* to, const From* from, size_t bytes) {  // a better match than the C library's
  kcpu::check_aligned(to, bytes);
  kcpu::check_aligned(from, bytes);
  return ::memcpy(to, from, bytes);
}
}  // namespace prim

// ---------------------------------------------------------------- CUDA's names

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("kcpu_shared")))  // one block at a time, so one copy is enough

#define threadIdx (kcpu::fibers[kcpu::current].thread_idx)
#define blockIdx (kcpu::fibers[kcpu::current].block_idx)
#define blockDim (kcpu::block_dim)
#define gridDim (kcpu::grid_dim)

inline void __syncthreads() {
  kcpu::syncthreads();
}

inline void __syncwarp(unsigned /*mask*/ = 0xffffffffu) {
  const int nothing = 0;
  kcpu::warp_collective(&nothing, sizeof nothing, nullptr, 0, [](kcpu::Warp&) {});
}

// Full warps only: the mask is ignored.
template <class T>
inline T __shfl_xor_sync(unsigned /*mask*/, T value, int lane_mask) {
  T result;
  kcpu::warp_collective(&value, sizeof(T), &result, sizeof(T), [lane_mask](kcpu::Warp& warp) {
    for (int lane = 0; lane < kcpu::WARP_SIZE; lane++) {
      memcpy(warp.out[lane], warp.in[lane ^ lane_mask], sizeof(T));
    }
  });
  return result;
}

template <class T, class Source>
inline T shuffle(T value, Source source) {
  T result;
  kcpu::warp_collective(&value, sizeof(T), &result, sizeof(T), [source](kcpu::Warp& warp) {
    for (int lane = 0; lane < kcpu::WARP_SIZE; lane++) memcpy(warp.out[lane], warp.in[source(lane)], sizeof(T));
  });
  return result;
}

inline bool __any_sync(unsigned /*mask*/, bool value) {
  int mine = value, any = 0;
  kcpu::warp_collective(&mine, sizeof mine, &any, sizeof any, [](kcpu::Warp& warp) {
    int said = 0;
    for (int i = 0; i < 32; i++) said |= *(int*)warp.in[i];
    for (int i = 0; i < 32; i++) memcpy(warp.out[i], &said, sizeof said);
  });
  return any;
}
template <class T>
inline T __shfl_sync(unsigned /*mask*/, T value, int from) {
  struct Lane { T value; int from; };         // every lane may name another source
  const Lane mine{value, from & 31};
  T result;
  kcpu::warp_collective(&mine, sizeof mine, &result, sizeof result, [](kcpu::Warp& warp) {
    for (int lane = 0; lane < kcpu::WARP_SIZE; lane++) {
      Lane asks;
      memcpy(&asks, warp.in[lane], sizeof asks);
      memcpy(warp.out[lane], warp.in[asks.from], sizeof(T));
    }
  });
  return result;
}

template <class T>
inline T __shfl_up_sync(unsigned /*mask*/, T value, int distance) {
  return shuffle(value, [distance](int lane) { return lane < distance ? lane : lane - distance; });
}

inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}

inline int atomicMax(int* at, int value) {
  const int before = *at;
  *at = std::max(before, value);
  return before;
}

inline void __threadfence() {}
inline int __popc(uint32_t v) { return __builtin_popcount(v); }

struct uint2 { uint32_t x, y; };
struct int2 { int x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct __nv_bfloat16 {
  uint16_t x;
};

inline float __bfloat162float(__nv_bfloat16 b) {
  return __uint_as_float((uint32_t)b.x << 16);
}

// Round to nearest, ties to even. NaN becomes 0x7fff as on the GPU; without that line the rounding carry would turn the
// poison pattern 0xffffffff into zero and hide it.
inline __nv_bfloat16 __float2bfloat16(float value) {
  if (value != value) return {0x7fff};
  const uint32_t bits = __float_as_uint(value);
  const uint32_t tie_to_even = (bits >> 16) & 1;
  return {(uint16_t)((bits + 0x7fff + tie_to_even) >> 16)};
}
