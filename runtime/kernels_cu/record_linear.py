"""Products, as launches: of few rows by whichever kernel was measured to be fastest, of more by the device's library.

A library's product writes garbage where a row is dead; nothing reads that. With `invariant` every product is the library's, by
the algorithm that it has for all numbers of rows, for the kernel's order of summation is another.
"""

from __future__ import annotations

from runtime.kernels_cu import linear_skinny, linear_stream, mla_prep
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.linear_choice import choose_config, choose_stream, fastest
from runtime.kernels_cu.linear_lt import describe
from runtime.kernels_cu.linear_skinny import Dims
from runtime.kernels_cu.recorder import Recorder, op

_ROPE = mla_prep.Config()  # the build that query_rope comes from; its own launch does not depend on it


def record_product(r: Recorder, dims: Dims, *, x: int, w: int, out: int, float_out: bool = False, seq: int = 0) -> None:
    """out [M, heads, N] = x [M, heads, K] w [heads, N, K]^T; addresses; seq: marks of dead rows, 0: none is."""
    device = r.device
    kernel = "library" if r.invariant else r.choose(("linear", dims), lambda: fastest(dims, device.gpu, device.arch))
    if kernel == "library":
        strides = {"x_row": dims.x_row, "out_row": dims.out_row, "x_head": dims.x_head, "out_head": dims.out_head}
        product = describe(dims.M, dims.N, dims.K, heads=dims.heads, float_out=float_out, **strides)
        r.append(device.multiply(product, w, x, out, invariant=r.invariant))
        return
    at = {"w": w, "x": x, "out": out, "seq": seq}
    if kernel == "stream":
        wide = r.choose(("linear_stream", dims), lambda: choose_stream(dims, device.gpu, device.arch, r.hw, device.sms)[0])
        at |= r.scratch("linear_stream", linear_stream.workspace_bytes(dims, wide))
        call = linear_stream.call(wide, dims, at, float_out)
        r.launch(call, device.functions(wide.source, wide.defines(), wide.entries))
        return
    config = r.choose(("linear_skinny", dims), lambda: choose_config(dims, device.gpu, device.arch, r.hw)[0])
    at |= r.scratch("linear", linear_skinny.workspace_bytes(dims, config))
    call = linear_skinny.call(config, dims, at, float_out)
    r.launch(call, device.functions(linear_skinny.SOURCE, config.defines(), linear_skinny.ENTRIES))


@op
def linear(r: Recorder, x: DeviceArray, w: DeviceArray, *, out: DeviceArray) -> None:
    dims = Dims.plain(len(x), *w.shape)
    record_product(r, dims, x=x.flat, w=w.flat, out=out.flat, seq=r.alive(dims.M))


@op
def linear_f32(r: Recorder, x: DeviceArray, w: DeviceArray, *, out: DeviceArray) -> None:
    """Its rows are those of a selection, so the bucket's marks of dead rows do not apply: a row beyond the live ones is garbage."""
    record_product(r, Dims.plain(len(x), *w.shape), x=x.flat, w=w.flat, out=out.flat, float_out=True)


@op
def mla_query(r: Recorder, q: DeviceArray, w_uk: DeviceArray, pos: DeviceArray, cos_sin: DeviceArray, *, out: DeviceArray) -> None:
    (m, heads, _), (_, latent, nope), rope = out.shape, w_uk.shape, cos_sin.shape[1]
    alive = r.alive(m)
    record_product(r, Dims.absorb(m, heads, nope, rope, latent), x=q.flat, w=w_uk.flat, out=out.flat, seq=alive)
    dims = mla_prep.Dims(M=m, A=heads, Q=8, L=latent, R=rope, N=nope)  # Q is the latent's
    call = mla_prep.query_rope(dims, q=q.flat, cos_sin=cos_sin.flat, pos=pos.flat, out=out.flat, seq=alive)
    r.launch(call, r.device.functions(mla_prep.SOURCE, _ROPE.defines(), mla_prep.ENTRIES))


@op
def mla_value(r: Recorder, u: DeviceArray, w_uv: DeviceArray, *, out: DeviceArray) -> None:
    (m, heads, latent), width = u.shape, w_uv.shape[1]
    record_product(r, Dims.value(m, heads, latent, width), x=u.flat, w=w_uv.flat, out=out.flat, seq=r.alive(m))
