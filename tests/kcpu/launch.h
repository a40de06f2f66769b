// KCPU_ENTRY(kernel) defines cpu_<kernel>(shape, arguments): shape = grid x, y, z, threads, shared bytes, descending, blocks of a cluster;
// arguments = pointers to the values in order, as the driver's launch takes them. KCPU_RUN(kernel) calls it run_<kernel>, where
// cpu_<kernel> takes arguments of its own.
#pragma once
#include <type_traits>
#include <utility>

template <class... A, size_t... I>
inline void kcpu_call(void (*kernel)(A...), const int* shape, void** arguments, std::index_sequence<I...>) {
  kcpu::descending = shape[5];
  kcpu::launch({(unsigned)shape[0], (unsigned)shape[1], (unsigned)shape[2]}, {(unsigned)shape[3], 1, 1}, shape[4],
               [=] { kernel(*(std::remove_reference_t<A>*)arguments[I]...); }, shape[6]);
}
template <class... A> inline void kcpu_call(void (*kernel)(A...), const int* shape, void** arguments) {
  kcpu_call(kernel, shape, arguments, std::index_sequence_for<A...>{});
}
#define KCPU_ENTRY(kernel) \
  extern "C" void cpu_##kernel(const int* shape, void** arguments) { kcpu_call(kernel, shape, arguments); }
#define KCPU_RUN(kernel) \
  extern "C" void run_##kernel(const int* shape, void** arguments) { kcpu_call(kernel, shape, arguments); }
