// tree_mla_merge (MERGE_LATER): adds up the parts of O of all split column tiles, behind tree_mla. Its blocks share out every item's
// units as the items themselves would; all parts of a unit are on their way to a team of warps at once, nothing passes through
// shared memory but the team's sums. Included at the end of a kernel that has given put_unit, and included the ring.
#pragma once

#if MERGE_LATER
// Blocks an item; parts that a warp asks for at once. Blocks for which there is no room beside tree_mla's enter where one of those leaves,
// up to four on the same SM; the next layer's block has no room there before they end, so it asks for nothing early.
constexpr int kMergers = MERGERS ? MERGERS : OCTETS == 1 ? 2 : 4, kAtOnce = 4;

// Of a lane's two columns: maxima, sums of weights, and what the weights were multiplied with.
struct Sum {
  float4 o;
  float high[2], weights[2];
  __device__ __forceinline__ void rise(float x, float y) {
    const float fx = exp2_fast(high[0] - x), fy = exp2_fast(high[1] - y);
    high[0] = x;
    high[1] = y;
    weights[0] *= fx;
    weights[1] *= fy;
    o = float4{o.x * fx, o.y * fy, o.z * fx, o.w * fy};
  }
  __device__ __forceinline__ void add(const float4& v, float fx, float fy, float x, float y) {
    weights[0] = fmaf(fx, x, weights[0]);
    weights[1] = fmaf(fy, y, weights[1]);
    o = float4{fmaf(fx, v.x, o.x), fmaf(fy, v.y, o.y), fmaf(fx, v.z, o.z), fmaf(fy, v.w, o.w)};
  }
};

__device__ __forceinline__ float4 load_part(const Params& p, size_t slot, int unit, int lane) {
  const Partial* from = reinterpret_cast<const Partial*>(p.part) + (slot * kUnits + unit) * 32 + lane;
#if PART_F32
  const uint4 v = ldg128_cg(from);
  return float4{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
#else
  const uint2 v = ldg64_cg(from);
  return float4{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y)};
#endif
}
// Maximum and sum of the lane's columns.
__device__ __forceinline__ float4 load_stats(const Params& p, size_t slot, int unit, int lane) {
  const uint4 v = ldg128_cg(p.stats + (slot * kN + unit / 32 * 8 + 2 * (lane & 3)) * 2);
  return float4{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Parts `first`, `first` + `step`, ... of a unit.
__device__ __forceinline__ Sum gather(const Params& p, const Item& it, int unit, int first, int step, int lane) {
  Sum sum{{0.f, 0.f, 0.f, 0.f}, {kNever, kNever}, {0.f, 0.f}};
#pragma unroll 1
  for (int i = first; i < it.splits; i += kAtOnce * step) {
    float4 part[kAtOnce], stats[kAtOnce];
    float x = sum.high[0], y = sum.high[1];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const size_t slot = (size_t)it.slot + (size_t)least(i + k * step, it.splits - 1) * it.stride;
      stats[k] = load_stats(p, slot, unit, lane);
      part[k] = load_part(p, slot, unit, lane);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      x = fmaxf(x, stats[k].x);
      y = fmaxf(y, stats[k].z);
    }
    sum.rise(x, y);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (i + k * step < it.splits) sum.add(part[k], exp2_fast(stats[k].x - x), exp2_fast(stats[k].z - y), stats[k].y, stats[k].w);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(256, PART_F32 ? 3 : 4) tree_mla_merge(const __grid_constant__ Params p) {
  __shared__ Sum sums[7][32];                              // of all but a team's first warp; with a kilobyte of the system's they are one box
  const int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
  pdl_trigger();                                           // the next layer's blocks enter as tree_mla's leave, and ask for their keys
  const int count = *p.count;                              // the list is older than tree_mla, which let this kernel start behind its own wait
  Item it = p.items[blockIdx.x / kMergers];
  const int columns = it.columns;
#pragma unroll 1
  for (bool real = !REHEARSED;; real = true) {
    it.columns = real ? columns : 0;                       // to none, or to all
    if (real) pdl_wait();
    stamp_common(14, threadIdx.x == 0 && blockIdx.x < kStamped);
    for (int i = blockIdx.x / kMergers; i < count; i += gridDim.x / kMergers) {
      if (i >= (int)gridDim.x / kMergers) {
        if (!real) break;
        it = p.items[i];
      }
      if (!it.tiles || it.splits < 2) continue;
      const int share = it.split * kMergers + blockIdx.x % kMergers, shares = it.splits * kMergers;
      const int u1 = kUnits * (share + 1) / shares, team = it.splits > 16 ? 8 : it.splits > 8 ? 4 : it.splits > 4 ? 2 : 1;
      for (int u0 = kUnits * share / shares; u0 < u1; u0 += 8 / team) {
        const int u = u0 + warp / team;
        Sum sum{{0.f, 0.f, 0.f, 0.f}, {kNever, kNever}, {0.f, 0.f}};
        if (u < u1) sum = gather(p, it, u, warp % team, team, lane);
        if (team > 1) {
          __syncthreads();                                   // the sums before are read
          if (warp % team) sums[warp - 1][lane] = sum;
          __syncthreads();
        }
        if (u >= u1 || warp % team) continue;
        for (int k = 1; k < team; ++k) {
          const Sum other = sums[warp + k - 1][lane];
          const float x = fmaxf(sum.high[0], other.high[0]), y = fmaxf(sum.high[1], other.high[1]);
          sum.rise(x, y);
          const float fx = exp2_fast(other.high[0] - x), fy = exp2_fast(other.high[1] - y);
          sum.add(other.o, fx, fy, other.weights[0], other.weights[1]);
        }
        const float x = 1.f / sum.weights[0], y = 1.f / sum.weights[1];
        put_unit(p, it, u, float4{sum.o.x * x, sum.o.y * y, sum.o.z * x, sum.o.w * y}, lane);
      }
    }
    if (real) break;
  }
  stamp_common(15, threadIdx.x == 0 && blockIdx.x < kStamped);
}
#endif
