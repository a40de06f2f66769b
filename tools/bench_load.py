#!/usr/bin/env python3
"""Streams a checkpoint of Kimi K2.6's layer shapes to a GPU and compares the rate with that of plain copies of pinned memory.

    python tools/bench_load.py --folder /tmp/k26                              # writes 11 GB there first, unless they are there
    python tools/bench_load.py --folder /tmp/k26 --tp 8 --rank 3              # one rank's slices
    python tools/bench_load.py --folder /tmp/k26 --rings 16x24x16 16x32x4 16x24x16@200 --rounds 3    # threads, slots, MiB, switch us
    python tools/bench_load.py --folder /tmp/k26 --json tools/results/load_h200.jsonl

The checkpoint holds one dense and --layers - 1 expert layers and a short vocabulary, its words random, its scales small. It has
just been written, so that reads come from the page cache: what is measured is the runtime, not a disk. Timed is
`kimi_k26.load` until the device has everything, apart from making and giving back the ring of pinned buffers, which is stated
beside it. Two lines say where the time went: the main thread's, and the readers' (`runtime/kernels_cu/readers.py`); their rate on
a core is what memory gives, the rest of reading waits for Python's lock. Some experts and matrices are then compared with what the
host packs, bit for bit. Rounds after the first find memory that CuPy still holds. Needs a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model import kimi_k26
from model.pack_w4 import w4_from_experts, w4_from_gate_up
from model.shards import INDEX, ITEM_BYTES
from model.weights import Checkpoint
from runtime.kernels_cu import readers as ring_of_slots
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.readers import Spent
from runtime.kernels_cu.recorder import DeviceW4
from runtime.kernels_cu.residency import Loader
from tools.bench_moe import has_gpu, provenance

VOCAB = 16384
BLOCK_BYTES = 64 << 20
COPIES, COPY_BYTES = 8, 128 << 20
CHECKED_EXPERTS = (0, 1, 200, 383)
POSITIONS = 4096  # of the rotary table


def write_checkpoint(folder: Path, layers: int, vocab: int = VOCAB, **changes: Any) -> None:
    """A checkpoint of Kimi K2.6's shapes, one shard a layer, in the order of `kimi_k26.tensors`. changes: keys of text_config."""
    config = json.loads((ROOT / "model/configs/kimi-k26.json").read_text(encoding="utf-8"))
    config = copy.deepcopy(config)
    config["text_config"] |= {"num_hidden_layers": layers, "vocab_size": vocab} | changes
    spec = kimi_k26.tensors(kimi_k26.Config.from_json(config))
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    words = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
    # bf16 numbers of 2^-9 to 2^-8, either sign: scales and weights alike
    sign = rng.integers(0, 2, BLOCK_BYTES // 2, np.uint16) << np.uint16(15)
    small = rng.integers(0, 0x80, BLOCK_BYTES // 2, np.uint16) | np.uint16(0x3B00) | sign
    home: dict[str, str] = {}
    for shard in range(layers + 1):
        layer, file = f"model.layers.{shard}.", f"model-{shard + 1:05d}-of-{layers + 1:06d}.safetensors"
        mine = {n: s for n, s in spec.items() if (n.startswith(layer) if shard < layers else not n.startswith("model.layers."))}
        _write_shard(folder / file, mine, {"i32": words, "bf16": small.view(np.uint8)})
        home |= {f"language_model.{name}": file for name in mine}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": home}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")  # last: a folder with one is whole


def _write_shard(path: Path, spec: kimi_k26.Spec, blocks: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, dtype) in spec.items():
        size = int(np.prod(shape)) * ITEM_BYTES[dtype]
        header[f"language_model.{name}"] = {"dtype": dtype.upper(), "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, (name, (shape, dtype)) in enumerate(spec.items()):
            if name.endswith("weight_shape"):
                n, words = spec[name.replace("weight_shape", "weight_packed")][0]
                file.write(np.array([n, 8 * words], np.int32).tobytes())
                continue
            left = int(np.prod(shape)) * ITEM_BYTES[dtype]
            if dtype == "f32":
                file.write(bytes(left))
                continue
            block, start = blocks[dtype], 4096 * i % (BLOCK_BYTES // 2)
            while left:
                piece = block[start : start + left]
                file.write(piece.data)
                left, start = left - piece.nbytes, 0


def copy_rate(device: Any) -> float:
    """Bytes a second of copies from pinned memory, COPIES of COPY_BYTES in a row, the best of three."""
    link = device.link()
    host, to = link.pinned(COPY_BYTES), device.alloc(COPY_BYTES)
    link.begin()
    best = 0.0
    for _ in range(4):  # the first warms up
        start = time.perf_counter()
        for _ in range(COPIES):
            link.send(host, to)
        link.mark(0)
        link.wait(0)
        best = max(best, COPIES * COPY_BYTES / (time.perf_counter() - start))
    link.close()
    device.free(to)
    return best


def differences(backend: Any, there: kimi_k26.Weights, ckpt: Checkpoint, c: kimi_k26.Config, tp: int, rank: int) -> Iterator[str]:
    """Names of what lies on the device otherwise than the host would have packed it, among a sample."""

    def cut(size: int) -> slice:
        return slice(rank * size // tp, (rank + 1) * size // tp)

    for i, layer in enumerate(there.layers):
        p = f"model.layers.{i}."
        wanted = [
            ("o", layer.o, ckpt.get(f"{p}self_attn.o_proj.weight", None, cut(c.heads * c.value))),
            ("q_b", layer.q_b, ckpt.get(f"{p}self_attn.q_b_proj.weight", cut(c.heads * (c.nope + c.rope_dim)))),
        ]
        for name, have, want in wanted:
            if backend.host(have).tobytes() != want.tobytes():
                yield f"{p}{name}"
        if not isinstance(layer.mlp, kimi_k26.Moe):
            continue
        for e in [e for e in CHECKED_EXPERTS if e < c.experts]:
            q, width = f"{p}mlp.experts.{e}.", cut(c.expert_width)
            gate, up = (ckpt.get_w4(f"{q}{kind}_proj", width) for kind in ("gate", "up"))
            w13, w2 = w4_from_gate_up([gate], [up]), w4_from_experts([ckpt.get_w4(f"{q}down_proj", None, width)])
            for name, have, want in (("w13", layer.mlp.w13, w13), ("w2", layer.mlp.w2, w2)):
                data = np.empty(want.data.shape, np.uint8)
                backend.device.download(have.address + e * want.expert_bytes, data)
                if data.tobytes() != want.data.tobytes() or have.exponent != want.exponent:
                    yield f"{q}{name}"


MAIN_THREAD = ("load_s", "settle_s", "tail_s", "ahead_s", "cpu_s", "alloc_s", "upload_s")


@dataclass(frozen=True)
class Run:
    """One load: bytes on the device; seconds until it had them, in all, in `kimi_k26.load`, then until all was enqueued, then until
    it was there; of the load's, those in which it waited for readers, ran on a core, and was in the device's alloc and upload."""

    nbytes: int
    seconds: float
    load_s: float
    settle_s: float
    tail_s: float
    ahead_s: float
    cpu_s: float
    alloc_s: float
    upload_s: float
    readers: list[Spent]

    def split(self) -> dict[str, Any]:
        """For a record and for reading: shares of the readers' time, the rate of one while it reads, what a slot takes."""
        whole = self.seconds * len(self.readers)
        shares = {name: sum(getattr(r, name) for r in self.readers) / whole for name in ("jobs", "slots", "reading", "sending")}
        rates = [r.nbytes / r.reading / 1e9 for r in self.readers if r.reading] or [0.0]
        slots = sum(r.filled for r in self.readers)
        return {
            **{name: round(getattr(self, name), 4) for name in MAIN_THREAD}, "readers": len(self.readers),
            **{f"share_{name}": round(share, 3) for name, share in shares.items()},
            "read_gb_s": [round(min(rates), 2), round(sum(rates) / len(rates), 2), round(max(rates), 2)],
            "core_gb_s": round(sum(r.nbytes for r in self.readers) / max(sum(r.busy for r in self.readers), 1e-9) / 1e9, 2),
            "send_us": round(1e6 * sum(r.sending for r in self.readers) / max(slots, 1), 1),
            "late_us": round(1e6 * sum(r.late for r in self.readers) / max(slots, 1), 1),
            "slots": slots, "reads": sum(r.calls for r in self.readers),
        }  # fmt: skip

    def print(self) -> None:
        s = self.split()
        low, mean, high = s["read_gb_s"]
        print(
            f"  main thread: load {s['load_s']:.3f} s (on a core {s['cpu_s']:.3f}, waiting for readers {s['ahead_s']:.3f}, "
            f"alloc {s['alloc_s']:.3f}, upload {s['upload_s']:.3f}), until all is enqueued {s['settle_s']:.3f}, tail of "
            f"copies {s['tail_s']:.3f}\n"
            f"  {s['readers']} readers: reading {s['share_reading']:.0%} of the time at {low} to {high} GB/s each, mean {mean}, "
            f"{s['core_gb_s']} on a core; no job {s['share_jobs']:.0%}; no slot {s['share_slots']:.0%}; enqueueing "
            f"{s['share_sending']:.0%}, {s['send_us']:.0f} us a slot, {s['late_us']:.0f} us after it is read; {s['slots']} slots, "
            f"{s['reads']} reads"
        )


@contextmanager
def seconds_in(device: Any, name: str) -> Iterator[list[float]]:
    """The seconds of each call of a device's method."""
    method, spent = getattr(device, name), []

    def call(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = method(*arguments)
        spent.append(time.perf_counter() - start)
        return found

    setattr(device, name, call)
    yield spent
    delattr(device, name)


def load(ckpt: Checkpoint, config: kimi_k26.Config, backend: Any, tp: int, rank: int) -> tuple[Run, kimi_k26.Weights]:
    """One timed load on a backend whose ring is there."""
    readers, before = backend.loader.readers, backend.weight_bytes
    past, waited = [replace(r) for r in readers.spent], readers.ahead
    with seconds_in(backend.device, "alloc") as alloc, seconds_in(backend.device, "upload") as upload:
        start, core = time.perf_counter(), time.thread_time()
        weights = kimi_k26.load(ckpt, config, backend, rank, tp, POSITIONS)
        loaded, core = time.perf_counter(), time.thread_time() - core
    backend.loader.settle()
    settled = time.perf_counter()
    backend.device.synchronize()
    end = time.perf_counter()
    spent = [
        Spent(*(getattr(now, f.name) - getattr(was, f.name) for f in fields(Spent))) for now, was in zip(readers.spent, past, strict=True)
    ]
    nbytes = backend.weight_bytes - before
    times = loaded - start, settled - loaded, end - settled, readers.ahead - waited, core, sum(alloc), sum(upload)
    return Run(nbytes, end - start, *times, spent), weights


def measure(options: argparse.Namespace) -> None:
    from runtime.kernels_cu import repack_w4
    from runtime.kernels_cu.device import CupyDevice

    device = CupyDevice()
    device.functions(repack_w4.SOURCE, {}, repack_w4.ENTRIES)  # compiled before the clock starts
    rate = copy_rate(device)
    with Checkpoint.open(options.folder) as ckpt:
        runs = [(measure_ring(options, device, ckpt, ring, rate), ring) for _ in range(options.rounds) for ring in options.rings or [{}]]
    if len(runs) > 1:
        print_table(runs, rate)


def print_table(runs: list[tuple[Run, dict[str, int]]], rate: float) -> None:
    """All loads, the fastest first."""
    columns = "share_reading", "share_jobs", "share_slots", "share_sending", "core_gb_s", "late_us", "alloc_s"
    print(" share   GB/s ", *columns, " ring")
    for run, ring in sorted(runs, key=lambda one: one[0].seconds):
        s, gb_s = run.split(), run.nbytes / run.seconds / 1e9
        row = "".join(f" {s[name]:{len(name)}.3f}" for name in columns)
        print(f"  {1e9 * gb_s / rate:.2f}  {gb_s:6.1f} {row}  {ring or 'as the runtime has it'}")


def measure_ring(options: argparse.Namespace, device: Any, ckpt: Checkpoint, ring: dict[str, int], rate: float) -> Run:
    """One load through a ring, printed, compared and recorded. rate: of plain copies, bytes/s."""
    from runtime.kernels_cu.backend import CudaBackend

    config = kimi_k26.Config.from_json(ckpt.config)
    backend = CudaBackend(device)
    start = time.perf_counter()
    usual, size = ring_of_slots.SWITCH_S, {name: value for name, value in ring.items() if name != "switch_us"}
    ring_of_slots.SWITCH_S = 1e-6 * ring["switch_us"] if "switch_us" in ring else usual
    backend.loader = Loader(device, device.link(), **size)
    ring_of_slots.SWITCH_S = usual
    ring_s = time.perf_counter() - start
    run, weights = load(ckpt, config, backend, options.tp, options.rank)
    start = time.perf_counter()
    backend.settle()
    back_s = time.perf_counter() - start
    wrong = list(differences(backend, weights, ckpt, config, options.tp, options.rank))
    release(backend, weights)
    share = run.nbytes / run.seconds / rate
    print(
        f"{run.nbytes / 1e9:.2f} GB in {run.seconds:.3f} s = {run.nbytes / run.seconds / 1e9:.1f} GB/s, {share:.2f} of the "
        f"{rate / 1e9:.1f} GB/s of plain copies; ring of pinned buffers {ring_s:.2f} s, {back_s:.2f} s to give it back; sampled weights "
        f"{'differ: ' + ', '.join(wrong) if wrong else 'equal, bit for bit'}"
    )
    run.print()
    if wrong:
        raise SystemExit(1)
    if options.json:
        record = {
            "schema": 3, "layers": config.layers, "tp": options.tp, "rank": options.rank, "ring": ring, "gb": round(run.nbytes / 1e9, 3),
            "s": round(run.seconds, 4), "gb_s": round(run.nbytes / run.seconds / 1e9, 2), "copy_gb_s": round(rate / 1e9, 2),
            "share": round(share, 4), "ring_s": round(ring_s, 3), "ring_back_s": round(back_s, 3), **run.split(),
            **provenance(options.commit),
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return run


def release(backend: Any, weights: Any) -> None:
    """Frees a model's weights, so that the next ring finds the same memory."""
    for f in fields(weights):
        value = getattr(weights, f.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, DeviceArray | DeviceW4):
                backend.device.free(part.flat if isinstance(part, DeviceArray) else part.address)
            elif is_dataclass(part):
                release(backend, part)


def ring_of(text: str) -> dict[str, int]:
    """16x24x16: threads, slots and MiB of a slot, as `Loader` takes them; @50: a thread asks for Python's lock after so many us."""
    sizes, _, switch_us = text.partition("@")
    threads, slots, mib = (int(x) for x in sizes.split("x"))
    return {"threads": threads, "slots": slots, "slot_bytes": mib << 20} | ({"switch_us": int(switch_us)} if switch_us else {})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint lies; it is written if config.json is not there")
    parser.add_argument("--layers", type=int, default=2, help="layers of a checkpoint to write, 1 dense and the rest experts (default 2)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model (default 1)")
    parser.add_argument("--rank", type=int, default=0, help="whose slices are loaded (default 0)")
    parser.add_argument(
        "--rings", nargs="+", type=ring_of, metavar="THREADSxSLOTSxMIB[@US]", help="a load for each (default: the runtime's)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="so many loads of each ring, in turn; a table at the end (default 1)")
    parser.add_argument("--json", type=Path, help="append a record")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    options = parser.parse_args(arguments)
    if not (options.folder / "config.json").is_file():
        start = time.perf_counter()
        write_checkpoint(options.folder, options.layers)
        print(f"wrote {options.folder} in {time.perf_counter() - start:.1f} s")
    if not has_gpu():
        raise SystemExit("no CUDA device here: nothing was measured")
    measure(options)


if __name__ == "__main__":
    main()
