"""Attention over the latent cache, as launches: the step's list of items before the first layer, then one launch a layer."""

from __future__ import annotations

from dataclasses import replace

from runtime.kernels_cu import tree_mla as family
from runtime.kernels_cu import tree_paths
from runtime.kernels_cu._call import Call
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.recorder import Recorder, op
from runtime.kernels_cu.tree_mla_config import TILE, VALUE, WIDTH, Config, Dims, candidates, default_config, predict_us, served
from runtime.kernels_cu.tree_paths import PathPages

_EXPECTED_KEYS, _TREE_ROWS = 8192, 9  # a context, and a tree's rows, for which a bucket's configuration is chosen
_INVARIANT_ROWS, _INVARIANT_STREAMS = 64, 8  # for these the one configuration of an invariant backend is chosen
_LEAST_TILES, _INVARIANT_BYTES = 8, 2 << 30  # of its ranges of keys; of the partials of its largest bucket


@op
def tree_mla(
    r: Recorder,
    q: DeviceArray,
    cache: DeviceArray,
    pages: DeviceArray,
    page_size: int,
    ctx: DeviceArray,
    row0: DeviceArray,
    seq: DeviceArray,
    pos: DeviceArray,
    slot: DeviceArray,
    ancestors: DeviceArray,
    scale: float,
    *,
    out: DeviceArray,
) -> None:
    """Node j of a sequence lies at position ctx + j of its pages, the plan's rule, so pos and slot are not read."""
    if (q.shape[2], out.shape[2]) != (WIDTH, VALUE):
        raise ValueError(
            f"tree_mla: keys of {q.shape[2]} and values of {out.shape[2]} numbers; the kernel is built for {WIDTH} and {VALUE}"
        )
    dims = Dims(len(q), len(ctx), q.shape[1], pages.shape[1] * page_size, page_size, ancestors.shape[1])
    if r.paths is not None:
        dims = replace(dims, B=dims.M)
    early = r.paths is None  # else a layer's keys are copied into private pages ahead of it
    if r.invariant:
        config = r.choose(("tree_mla", dims.heads, dims.page_size), lambda: served(_invariant_config(r, dims), dims, early))
        config.check(dims, r.device.arch)
    else:
        config = r.choose(("tree_mla", dims), lambda: served(_config(r, dims), dims, early))
    functions = r.device.functions(config.source, config.defines(dims.heads), family.entries(config))
    family.check_resident(config, r.device.resident(functions["tree_mla"], config.threads, config.smem_bytes()))
    blocks = r.device.sms
    at = r.scratch("tree_mla", family.workspace_bytes(dims, config, blocks))
    at |= {"q": q.flat, "cache": cache.flat, "pages": pages.flat, "ancestors": ancestors.flat, "out": out.flat}
    at |= {"ctx": ctx.flat, "row0": row0.flat, "seq": seq.flat}
    plan = (dims, *(at[name] for name in ("ctx", "row0", "seq", "items")))
    planned, r.planned = r.planned == plan, plan
    private, slots = (None, len(cache)) if r.paths is None else _private(r, r.paths, dims, at, planned)
    if not planned:
        r.launch(family.plan_call(dims, config, blocks, at), functions)
    if private is not None:
        r.launch(private, r.device.functions(tree_paths.SOURCE, {}, tree_paths.ENTRIES))
    r.launch(family.layer_call(dims, config, blocks, at, scale, slots, behind_plan=not planned), functions)
    if family.merges_later(config):  # asked how many fit, the function gets its division of an SM's memory
        r.device.resident(functions[family.MERGE], family.MERGE_THREADS, family.MERGE_SMEM)
        r.launch(family.merge_call(dims, config, blocks, at, scale), functions)


def _private(r: Recorder, paths: PathPages, dims: Dims, at: dict[str, int], planned: bool) -> tuple[Call, int]:
    """A layer's copies into private pages, and cache rows from the layer's first to the last of those; `at` then names the
    sequences that the rows of trees have become."""
    behind, page_bytes = r.path_slots.address - at["cache"], 2 * WIDTH * paths.page_size
    if paths.rows < dims.M or dims.page_size != paths.page_size or behind < 0 or behind % page_bytes:
        raise ValueError(
            f"tree_mla: {dims.M} rows, pages of {dims.page_size}, private pages {behind} bytes behind the layer's first; "
            f"want whole pages behind a layer of the latent cache, which was made for {paths}"
        )
    at |= r.scratch("tree_paths", tree_paths.workspace_bytes(dims, paths))
    if not planned:
        r.launch(tree_paths.plan_call(dims, paths, at), r.device.functions(tree_paths.SOURCE, {}, tree_paths.ENTRIES))
    at |= {name: at[f"own_{name}"] for name in ("ctx", "row0", "seq", "pages")}
    first = behind // page_bytes
    return tree_paths.copy_call(dims, paths, at, first, r.device.sms), first * paths.page_size + paths.slots


def _config(r: Recorder, dims: Dims) -> Config:
    """What is predicted to serve a bucket best: its rows may be one of each stream, or trees. Ten streams of 8 heads take an H200 19.4 us
    in 8 columns and 21.6 in 16, a tree of 9 nodes is predicted 15.8 and 13.4."""
    dims.check()
    keys, each = min(dims.keys, _EXPECTED_KEYS), (1,) if r.single_rows and dims.M == dims.B else (1, _TREE_ROWS)
    loads = [replace(dims, B=min(dims.B, -(-dims.M // rows)), keys=keys) for rows in each]
    return min(candidates(dims, r.device.arch), key=lambda config: sum(predict_us(load, config, r.hw, r.device.sms) for load in loads))


def _invariant_config(r: Recorder, dims: Dims) -> Config:
    """One for all buckets, chosen at the first that is recorded, the largest: its ranges of keys are as short as partials for every
    range of the longest sequence fit _INVARIANT_BYTES."""
    usual = replace(dims, M=_INVARIANT_ROWS, B=_INVARIANT_STREAMS, keys=min(dims.keys, _EXPECTED_KEYS), words=1)
    tiles = -(-dims.keys // TILE)
    for chunk in range(min(_LEAST_TILES, tiles), tiles + 2):
        config = default_config(usual, r.device.arch, r.hw, chunk=chunk)
        if family.workspace_bytes(dims, config, r.device.sms)["part"] <= _INVARIANT_BYTES:
            break
    config.check(dims, r.device.arch)
    return config
