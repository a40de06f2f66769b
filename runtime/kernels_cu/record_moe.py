"""The mixture of experts, as launches. `route` is its product alone; choosing is the first launch of the `moe_w4` that follows."""

from __future__ import annotations

from dataclasses import replace

from runtime.kernels_cu import moe_w4 as family
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.linear_skinny import Dims as Product
from runtime.kernels_cu.moe_choice import choose_config
from runtime.kernels_cu.moe_config import Config, Dims
from runtime.kernels_cu.record_linear import record_product
from runtime.kernels_cu.recorder import DeviceW4, Recorder, Routing, op

_INVARIANT_ROWS = 64  # for these the one configuration of an invariant backend is chosen


@op
def route(
    r: Recorder, x: DeviceArray, w: DeviceArray, bias: DeviceArray, scale: float, *, expert: DeviceArray, weight: DeviceArray
) -> None:
    if r.routing is not None:
        raise RuntimeError("route was recorded twice without the moe_w4 that makes the first one's choices")
    m, experts = len(x), len(w)
    logits = r.buffer("router_logits", (m, experts), "f32")
    record_product(r, Product.plain(m, *w.shape), x=x.flat, w=w.flat, out=logits.flat, float_out=True, seq=r.alive(m))
    r.routing = Routing(logits.flat, bias.flat, scale, expert, weight)


@op
def moe_w4(
    r: Recorder,
    x: DeviceArray,
    expert: DeviceArray,
    weight: DeviceArray,
    w13: DeviceW4,
    w2: DeviceW4,
    base: DeviceArray,
    *,
    out: DeviceArray,
) -> None:
    if not w13.interleaved or w2.interleaved:
        raise ValueError(
            f"moe_w4: w13 interleaved is {w13.interleaved} and w2's {w2.interleaved}; gate and up rows must be woven, down's not"
        )
    dims = Dims(M=len(x), E=w13.E, H=w13.K, F=w2.K, top_k=expert.shape[1])
    config = r.choose(("moe_w4", dims), lambda: _config(r, dims))
    sizes = family.workspace_bytes(dims, config)
    at = r.scratch("moe_w4", sizes)
    r.count_experts(at, sizes)
    at |= {"w13": w13.address, "w2": w2.address, "x": x.flat, "base": base.flat, "out": out.flat}
    at |= {"expert": expert.flat, "weight": weight.flat}
    routing, r.routing, scale = r.routing, None, 1.0
    if routing is not None:
        if (routing.expert, routing.weight) != (expert, weight):
            raise RuntimeError("moe_w4 was recorded with other choices than those of the route before it")
        at |= {"logits": routing.logits, "bias": routing.bias, "live": r.alive(dims.M)}
        scale = routing.scale
    built = {
        family.SOURCE: r.device.functions(family.SOURCE, config.defines(), family.ENTRIES),
        family.ROUTE_SOURCE: r.device.functions(family.ROUTE_SOURCE, family.route_defines(dims.E), family.ROUTE_ENTRIES),
    }
    family.check_resident(config, r.device.resident(built[family.SOURCE]["moe_w4"], config.threads, config.smem_bytes()))
    for source, call in family.layer_calls(dims, config, at, (w13.exponent, w2.exponent), r.device.sms, scale):
        r.launch(call, built[source])


def _config(r: Recorder, dims: Dims) -> Config:
    dims.check()
    if not r.invariant:
        return choose_config(dims, r.device.gpu, r.device.arch)[0]
    config, _ = choose_config(replace(dims, M=_INVARIANT_ROWS), r.device.gpu, r.device.arch)
    config = replace(config, float_parts=True, token_rows=0)  # what a bucket alone may decide
    config.check(dims, r.device.arch)
    return config
