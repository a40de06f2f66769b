// Rows of all ranks side by side: out[m] = the ranks' x[m], one after the other, for few and short rows.
//
//   block = a row     its words go to every other rank as packets that carry their own flag (prim/team.cuh); no barrier, no second launch
//
// Inequality, q_a and kv_a over 8 ranks: a row is 528 B a rank, 7.4 KB on the link with flags: 0.02 us, after 1.3 us one way. NCCL and
// the kernel that puts its parts side by side take some 8 us and 2. From more rows than blocks on, NCCL's half the bytes count.
#include "prim/pipeline.cuh"
#include "prim/team.cuh"

using namespace prim;

#ifndef WORLD
#error "build with -DTHREADS= -DWORLD= -DBLOCKS="
#endif
using Seat = TeamSeat<WORLD, BLOCKS>;

extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_ranks(const uint64_t* x, uint64_t* out, int words, __grid_constant__ const Seat seat) {
  __shared__ uint32_t lost;
  const int m = blockIdx.x;                               // x [M, words], out [M, WORLD, words]
  pdl_trigger();
  pdl_wait();
  RankTeam<THREADS, WORLD, BLOCKS> ranks = {seat, nullptr, nullptr, &lost, seat.state->epoch[m]};
  if (threadIdx.x == 0) lost = seat.state->failed;
  ranks.swap(x + (size_t)m * words, out + (size_t)m * WORLD * words, words);
  if (threadIdx.x == 0) seat.state->epoch[m] = ranks.epoch;
}
