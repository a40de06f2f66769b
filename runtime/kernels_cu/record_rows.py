"""Ops between the products, as launches: embedding, norms, gate, row copies, cache moves, latent preparation."""

from __future__ import annotations

from runtime.kernels_cu import dense, mla_prep
from runtime.kernels_cu.array import WIDTHS, DeviceArray
from runtime.kernels_cu.recorder import Recorder, op

_ROWS = dense.Config()  # of the ops that keep no row in registers


@op
def embed(r: Recorder, token: DeviceArray, table: DeviceArray, first: int, *, out: DeviceArray) -> None:
    m, hidden = out.shape
    call = dense.embed(
        _ROWS, m, hidden, table.shape[0], first, token=token.flat, table=table.flat, out=out.flat, seq=r.alive(m)
    )  # fmt: skip
    r.launch(call, r.device.functions(dense.SOURCE, _ROWS.defines(), dense.ENTRIES))


@op
def rms_norm(r: Recorder, x: DeviceArray, w: DeviceArray, eps: float, *, out: DeviceArray) -> None:
    m, hidden = x.shape
    config = dense.candidates(hidden)[0]
    call = dense.rms_norm(config, m, hidden, eps, x=x.flat, w=w.flat, out=out.flat, seq=r.alive(m))
    r.launch(call, r.device.functions(dense.SOURCE, config.defines(), dense.ENTRIES))


@op
def add_rms_norm(r: Recorder, x: DeviceArray, delta: DeviceArray, w: DeviceArray, eps: float, *, out: DeviceArray) -> None:
    m, hidden = x.shape
    config = dense.candidates(hidden)[0]
    call = dense.add_rms_norm(config, m, hidden, eps, x=x.flat, delta=delta.flat, w=w.flat, out=out.flat, seq=r.alive(m))
    r.launch(call, r.device.functions(dense.SOURCE, config.defines(), dense.ENTRIES))


@op
def silu_mul(r: Recorder, x: DeviceArray, *, out: DeviceArray) -> None:
    m, width = out.shape
    call = dense.silu_mul(m, width, x=x.flat, out=out.flat, seq=r.alive(m))
    r.launch(call, r.device.functions(dense.SOURCE, _ROWS.defines(), dense.ENTRIES))


@op
def copy(r: Recorder, x: DeviceArray, *, out: DeviceArray) -> None:
    m, hidden = x.shape
    if out.strides[1] != 1 and hidden > 1:
        raise ValueError(f"copy: out {list(out.shape)} has strides {list(out.strides)}; the numbers of a row must lie together")
    stride = out.strides[0] * WIDTHS[out.dtype]
    call = dense.copy(m, hidden, x=x.flat, out=out.address, out_stride_bytes=stride, seq=r.alive(m))
    r.launch(call, r.device.functions(dense.SOURCE, _ROWS.defines(), dense.ENTRIES))


@op
def gather_rows(r: Recorder, x: DeviceArray, rows: DeviceArray, *, out: DeviceArray) -> None:
    n, hidden = out.shape
    call = dense.gather_rows(n, hidden, x=x.flat, rows=rows.flat, live=r.counted("rows"), out=out.flat)
    r.launch(call, r.device.functions(dense.SOURCE, _ROWS.defines(), dense.ENTRIES))


@op
def kv_move(r: Recorder, cache: DeviceArray, moves: DeviceArray) -> None:
    layers, slots, width = cache.shape
    call = dense.kv_move(
        layers, slots, width * WIDTHS[cache.dtype], len(moves), cache=cache.flat, moves=moves.flat, live=r.counted("moves")
    )  # fmt: skip
    r.launch(call, r.device.functions(dense.SOURCE, _ROWS.defines(), dense.ENTRIES))


@op
def mla_latent(
    r: Recorder,
    a: DeviceArray,
    q_norm: DeviceArray,
    kv_norm: DeviceArray,
    eps: float,
    pos: DeviceArray,
    slot: DeviceArray,
    cos_sin: DeviceArray,
    *,
    q_latent: DeviceArray,
    cache: DeviceArray,
) -> None:
    dims = mla_prep.Dims(M=len(a), A=1, Q=len(q_norm), L=len(kv_norm), R=cos_sin.shape[1], N=8)  # A and N are the query's
    config = mla_prep.candidates(dims)[0]
    call = mla_prep.mla_latent(
        config, dims, eps, a=a.flat, q_norm=q_norm.flat, kv_norm=kv_norm.flat, cos_sin=cos_sin.flat, pos=pos.flat, slot=slot.flat,
        q_latent=q_latent.flat, cache=cache.flat, seq=r.alive(dims.M),
    )  # fmt: skip
    r.launch(call, r.device.functions(mla_prep.SOURCE, config.defines(), mla_prep.ENTRIES))
