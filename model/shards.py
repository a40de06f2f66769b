"""The files of a checkpoint folder, checked against each other: JSON, shard headers, the index.

Only headers are read here. Every length, offset and name is compared before anything is memory-mapped: a shard that was cut
short would otherwise read as zeros and serve nonsense.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ITEM_BYTES = {"bool": 1, "u8": 1, "i8": 1, "f8_e4m3": 1, "f8_e5m2": 1, "u16": 2, "i16": 2, "f16": 2, "bf16": 2}
ITEM_BYTES |= {"u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "f64": 8}
MAX_HEADER_BYTES = 100_000_000  # the format's own ceiling
MAX_LINES = 12  # faults listed in one error
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A folder that can not be served; the text names the file, the tensor and both values."""


class Stored(NamedTuple):
    """Where one tensor lies. start and stop count bytes from the end of the shard's header."""

    file: str
    name: str  # as the shard spells it, prefix included
    dtype: str  # bf16, f32, i32 …
    shape: tuple[int, ...]
    start: int
    stop: int


class Index(NamedTuple):
    """model.safetensors.index.json: where each tensor lies, and the bytes of all of them if the file says so."""

    shard_of: dict[str, str]
    total_size: int | None


def read_header(path: Path) -> dict[str, Stored]:
    """Parses a shard's header and checks it against the file's length: no overlap, no hole, nothing missing, nothing after.

    The format: u64 length of the header, JSON, then the tensors back to back (https://github.com/huggingface/safetensors).
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(f"{path}: its {file_bytes} bytes can not hold the {length}-byte header they announce; download it again")
        header = _parse_json(file.read(length), path)
    tensors = {name: _parse_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    end, last = 0, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a hole after"
            raise CheckpointError(f"{path}: {name} starts at byte {tensor.start} and {what} {last}, which ends at {end}")
        end, last = tensor.stop, name
    have = file_bytes - 8 - length
    if have < end:
        cut = [t.name for t in tensors.values() if t.stop > have]
        raise CheckpointError(
            f"{path} is cut short: {have} bytes of tensors where the header describes {end}, {end - have} missing; "
            f"{len(cut)} tensors are incomplete ({', '.join(sorted(cut)[:3])}); download the file again"
        )
    if have > end:
        raise CheckpointError(f"{path}: {have} bytes of tensors where the header describes {end}; {have - end} unknown bytes follow {last}")
    return tensors


def _parse_entry(path: Path, name: str, entry: Any) -> Stored:
    try:
        dtype, shape, (start, stop) = entry["dtype"].lower(), tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(x) is int and x >= 0 for x in (*shape, start, stop))
    except (TypeError, KeyError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: {name} is described by {entry!r}; expected dtype, shape and two data_offsets")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; known are {', '.join(ITEM_BYTES)}")
    need = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != need:
        raise CheckpointError(f"{path}: {name} {dtype} {shape} needs {need} bytes, but its offsets {start}:{stop} hold {stop - start}")
    return Stored(path.name, name, dtype, shape, start, stop)


def read_index(folder: Path) -> Index | None:
    """The index of a sharded folder, each shard it names being there; None for a folder with a single model.safetensors."""
    path = folder / INDEX
    if not path.exists():
        if (folder / SINGLE).exists():
            return None
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:MAX_LINES])
        raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; it holds {found}")
    index = read_json(path)
    listed, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: weight_map is {listed!r}; expected a mapping of tensor names to shards")
    for name, file in listed.items():
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise CheckpointError(f"{path}: {name} lies in {file!r}; expected the name of a file in the same folder")
    shards = sorted(set(listed.values()))
    missing = [f"{file}: not in the folder" for file in shards if not (folder / file).is_file()]
    if missing:
        refuse(f"{folder} lacks {len(missing)} of the {len(shards)} shards of its index; download them", missing)
    return Index(listed, metadata.get("total_size") if isinstance(metadata, dict) else None)


def check_coverage(folder: Path, index: Index, headers: Mapping[str, Mapping[str, Stored]]) -> None:
    """Raises unless the shards hold each tensor of the index once, where it says, and nothing else."""
    home = index.shard_of
    faults = [f"{file}: lacks {name}, which the index puts there" for name, file in home.items() if name not in headers[file]]
    for file, tensors in headers.items():
        for name in tensors:
            if name not in home:
                faults.append(f"{file}: holds {name}, which the index lacks")
            elif home[name] != file:
                faults.append(f"{file}: holds {name}, which the index puts into {home[name]}: one tensor in two shards")
    if faults:
        refuse(f"{folder / INDEX} and its shards disagree", faults)
    total = sum(t.stop - t.start for tensors in headers.values() for t in tensors.values())
    if index.total_size is not None and index.total_size != total:
        raise CheckpointError(f"{folder / INDEX}: total_size is {index.total_size}, but the shards hold {total} bytes of tensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object without repeated keys, or CheckpointError naming the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return _parse_json(path.read_bytes(), path)


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{path}: the key {twice!r} stands twice in one JSON object")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value


def refuse(what: str, faults: list[str]) -> NoReturn:
    """Raises one CheckpointError that lists the first faults and counts the rest."""
    more = f"\n  and {len(faults) - MAX_LINES} more" if len(faults) > MAX_LINES else ""
    raise CheckpointError(what + ":\n  " + "\n  ".join(faults[:MAX_LINES]) + more)
