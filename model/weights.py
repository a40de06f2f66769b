"""The weights of a checkpoint folder: checked when it is opened, then read slice by slice.

A folder holds config.json and either one model.safetensors or an index with its shards. Opening it reads headers only
(2 s and 150 MB of memory for the 208,215 tensors of a full-size text model). Nothing in a folder is ever executed: `auto_map`,
*.py and pickled weights are not looked at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # its import teaches NumPy, and through it safetensors, the name bfloat16
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from model.pack_w4 import read_triple
from model.shards import SINGLE, CheckpointError, Stored, check_coverage, read_header, read_index, read_json, refuse
from runtime.source import FileWindow, Source, Triple
from runtime.w4 import GROUP

__all__ = ["Checkpoint", "CheckpointError", "Progress", "legal_tp_sizes"]

Progress = Callable[[str, int], None]  # (tensor name, bytes read)

VISION = ("vision_tower.", "mm_projector.")
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype("<f2"), "f32": np.dtype("<f4"), "i32": np.dtype("<i4")}
NUMPY |= {"i64": np.dtype("<i8"), "u8": np.dtype("u1")}
MAX_TP = 64
_AXES = ("rows", "cols")


class Checkpoint:
    """The tensors of a folder under their plain names: no `language_model.`, no vision, and in a drafter no `model.`.

    `config` is config.json as it stands, `text_config` the nested text model or, in a flat file, the same dictionary.
    `quantised` says that the experts are INT4 triples; `total_bytes` is what the listed tensors take on disk.
    Every fault raises CheckpointError.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, Stored], progress: Progress | None) -> None:
        self.folder = folder
        self.config = config
        self.text_config = _text_config(config, folder)
        self.quantised = _check_quantisation(self.text_config, config, folder)
        self.total_bytes = sum(t.stop - t.start for t in tensors.values())
        self._tensors = tensors
        self._progress = progress
        self._shards: dict[str, Any] = {}
        self._open: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        for t in tensors.values():
            self._ends[t.file] = max(self._ends.get(t.file, 0), t.stop)
        self._places: dict[str, tuple[Path, int]] = {}
        self._check_triples()

    @classmethod
    def open(cls, path: str | Path, progress: Progress | None = None) -> Checkpoint:
        """Checks the folder and reads no weights; `progress(name, bytes)` is called at each later read."""
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give one that holds config.json and *.safetensors")
        config = read_json(folder / "config.json")
        index = read_index(folder)
        headers = {file: read_header(folder / file) for file in (sorted(set(index.shard_of.values())) if index else [SINGLE])}
        if index is not None:
            check_coverage(folder, index, headers)
        return cls(folder, config, _plain_names(headers, drafter="dflash_config" in config), progress)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the memory maps and files; arrays already read are copies and stay valid."""
        self._shards.clear()
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """bf16, f32, i32 …: the spelling that `expect` compares."""
        return self._find(name).dtype

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> NDArray[Any]:
        """One tensor, or the given rows and columns of it: only those bytes are read and copied.

        Returns [n, k] or [n] in the stored dtype (ml_dtypes.bfloat16, float32, int32 …). Slices have step 1 and lie inside
        the tensor; cols need a matrix.
        """
        tensor = self._find(name)
        self._check_readable(tensor)
        given = (rows,) if cols is None else (rows, cols)
        spans = [self._bounds(tensor, axis, cut) for axis, cut in enumerate(given)] if tensor.shape or cols is not None else []
        try:
            if cols is None or spans[1] == (0, tensor.shape[1]):
                array = self._read_rows(tensor, spans)
            else:
                shard = self._shards.get(tensor.file)
                if shard is None:
                    shard = self._shards[tensor.file] = safe_open(self.folder / tensor.file, framework="numpy")
                array = shard.get_slice(tensor.name)[tuple(slice(*span) for span in spans)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / tensor.file} changed after it was checked: reading {tensor.name} says {error}") from None
        if self._progress is not None:
            self._progress(name, array.nbytes)
        return array

    def source(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Source:
        """What `get` reads, not read yet: its place in its file for who fetches it alone, and `get` itself."""
        tensor = self._find(name)
        self._check_readable(tensor)
        if len(tensor.shape) == 1 and cols is None:
            spans = (0, 1), self._bounds(tensor, 0, rows)
            shape: tuple[int, ...] = (spans[1][1] - spans[1][0],)
        else:
            spans = self._bounds(tensor, 0, rows), self._bounds(tensor, 1, cols)
            shape = (spans[0][1] - spans[0][0], spans[1][1] - spans[1][0])
        path, data = self._place(tensor.file)
        window = FileWindow(path, data + tensor.start, tensor.dtype, tensor.shape[-1], *spans)
        return Source(shape, tensor.dtype, (window,), (partial(self.get, name, rows, cols),))

    def triple(self, prefix: str, rows: slice | None = None, cols: slice | None = None) -> Triple:
        """The INT4 matrix of the triple `prefix`.weight_{packed,scale,shape}, or a window of it in whole groups."""
        packed_name, scale_name, shape_name = (f"{prefix}.weight_{part}" for part in ("packed", "scale", "shape"))
        packed = self._find(packed_name)
        n, k = packed.shape[0], packed.shape[1] * 8
        said = tuple(int(x) for x in self.get(shape_name))
        if said != (n, k):
            where = f"{self.folder / self._find(shape_name).file}: {shape_name}"
            raise CheckpointError(f"{where} says {said}, but {packed_name} {packed.shape} holds {(n, k)}")
        start, stop = self._bounds(packed, 1, cols, k)
        if start % GROUP or stop % GROUP:
            raise CheckpointError(
                f"{self.folder / packed.file}: columns {start}:{stop} of {packed_name} ({k} inputs) split a group of {GROUP} "
                f"that shares one scale; this width can be cut for tensor-parallel sizes {legal_tp_sizes(k)}"
            )
        words = self.source(packed_name, rows, slice(start // 8, stop // 8))
        return Triple(words, self.source(scale_name, rows, slice(start // GROUP, stop // GROUP)))

    def get_w4(
        self, prefix: str, rows: slice | None = None, cols: slice | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[ml_dtypes.bfloat16]]:
        """`triple`, read: codes u8 [n, k] in 0..15 and scale bf16 [n, k/32]; the value is (code - 8) · scale. Eight inputs share a
        word, lowest nibble first (compressed-tensors, pack_to_int32).
        """
        return read_triple(self.triple(prefix, rows, cols))

    def expect(self, spec: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Compares the folder with {name: (shape, dtype)}; raises one error that lists missing, unexpected and differing tensors."""
        faults = []
        for name, (shape, dtype) in spec.items():
            tensor = self._tensors.get(name)
            if tensor is None:
                faults.append(f"missing {name}: expected {dtype} {tuple(shape)}")
                continue
            if tensor.shape != tuple(shape):
                faults.append(f"{tensor.file}: {name} has shape {tensor.shape}, expected {tuple(shape)}")
            if tensor.dtype != dtype.lower():
                faults.append(f"{tensor.file}: {name} is {tensor.dtype}, expected {dtype}")
        faults += [f"{t.file}: unexpected {name}: {t.dtype} {t.shape}" for name, t in self._tensors.items() if name not in spec]
        if faults:
            refuse(f"{self.folder} is not the model that its config.json describes", faults)

    def _read_rows(self, tensor: Stored, spans: list[tuple[int, int]]) -> NDArray[Any]:
        """Whole rows, or all of it where no axis is cut. Reads with Python's lock released: safetensors holds it, 9 ms for kv_b of
        Kimi K2.6, in which no reader of `runtime.kernels_cu.readers` can go on."""
        path, data = self._place(tensor.file)
        if tensor.file not in self._open:
            if path.stat().st_size < data + self._ends[tensor.file]:
                raise OSError(f"{path.stat().st_size} bytes, where the tensors end at {data + self._ends[tensor.file]}")
            self._open[tensor.file] = os.open(path, os.O_RDONLY)
        shape, kind = tensor.shape, NUMPY[tensor.dtype]
        start = data + tensor.start
        if spans:
            start += spans[0][0] * math.prod(shape[1:]) * kind.itemsize
            shape = (spans[0][1] - spans[0][0], *shape[1:])
        raw = np.empty(math.prod(shape) * kind.itemsize, np.uint8)
        done = 0
        while done < raw.nbytes:
            got = os.preadv(self._open[tensor.file], [raw[done:].data], start + done)
            if not got:
                raise OSError(f"end of file at byte {start + done}, {raw.nbytes - done} bytes too early")
            done += got
        array: NDArray[Any] = raw.view(kind).reshape(shape)
        return array

    def _find(self, name: str) -> Stored:
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r} among its {len(self._tensors)}; names() lists them")
        return self._tensors[name]

    def _check_readable(self, tensor: Stored) -> None:
        if tensor.dtype not in NUMPY:
            raise CheckpointError(f"{self.folder / tensor.file}: {tensor.name} is {tensor.dtype}; readable are {', '.join(NUMPY)}")

    def _place(self, file: str) -> tuple[Path, int]:
        """A shard's path and the byte after its header."""
        if file not in self._places:
            path = self.folder / file
            with path.open("rb") as shard:
                self._places[file] = path, 8 + int.from_bytes(shard.read(8), "little")
        return self._places[file]

    def _bounds(self, tensor: Stored, axis: int, cut: slice | None, size: int | None = None) -> tuple[int, int]:
        """First and last of a cut along an axis, of `size` entries if not the stored ones."""
        if axis >= len(tensor.shape):
            raise CheckpointError(
                f"{self.folder / tensor.file}: {tensor.name} has shape {tensor.shape}: it can not be cut by {_AXES[min(axis, 1)]} {cut}"
            )
        size = tensor.shape[axis] if size is None else size
        if cut is None:
            return 0, size
        start = 0 if cut.start is None else int(cut.start)
        stop = size if cut.stop is None else int(cut.stop)
        if cut.step not in (None, 1) or not 0 <= start < stop <= size:
            where = f"{self.folder / tensor.file}: {tensor.name}"
            raise CheckpointError(f"{where}: {_AXES[min(axis, 1)]} {cut} do not lie inside 0:{size} with step 1")
        return start, stop

    def _check_triples(self) -> None:
        faults = []
        for name, tensor in self._tensors.items():
            prefix, _, part = name.rpartition(".")
            if part in ("weight_zero_point", "weight_g_idx"):
                faults.append(f"{tensor.file}: {name} belongs to asymmetric or reordered INT4; only symmetric groups of {GROUP} are known")
            if part in ("weight_packed", "weight_scale", "weight_shape"):
                if not self.quantised:
                    faults.append(f"{tensor.file}: {name} is quantised, but config.json has no quantization_config")
                lacking = [p for p in ("packed", "scale", "shape") if f"{prefix}.weight_{p}" not in self._tensors]
                if lacking:
                    faults.append(f"{tensor.file}: {name} has no {' and no '.join(f'{prefix}.weight_{p}' for p in lacking)} beside it")
                elif part == "weight_packed":
                    faults += self._compare_triple(prefix, tensor)
        if faults:
            refuse(f"{self.folder} holds INT4 tensors that do not fit together", faults)

    def _compare_triple(self, prefix: str, packed: Stored) -> Iterator[str]:
        scale, shape = self._tensors[f"{prefix}.weight_scale"], self._tensors[f"{prefix}.weight_shape"]
        for tensor, dtypes in ((packed, ("i32",)), (scale, ("bf16",)), (shape, ("i32", "i64"))):
            if tensor.dtype not in dtypes:
                yield f"{tensor.file}: {tensor.name} is {tensor.dtype}, expected {' or '.join(dtypes)}"
        if shape.shape != (2,):
            yield f"{shape.file}: {shape.name} has shape {shape.shape}, expected (2,)"
        if len(packed.shape) != 2 or packed.shape[1] * 8 % GROUP:
            yield f"{packed.file}: {packed.name} has shape {packed.shape}, expected [n, k/8] with k a multiple of {GROUP}"
        elif scale.shape != (packed.shape[0], packed.shape[1] * 8 // GROUP):
            fitting = (packed.shape[0], packed.shape[1] * 8 // GROUP)
            yield f"{scale.file}: {scale.name} has shape {scale.shape}, but {packed.name} {packed.shape} needs {fitting}"


def legal_tp_sizes(k: int) -> list[int]:
    """The sizes up to 64 by which k inputs can be cut with every part a whole number of INT4 groups."""
    return [size for size in range(1, MAX_TP + 1) if k % (GROUP * size) == 0]


def _plain_names(headers: Mapping[str, Mapping[str, Stored]], drafter: bool) -> dict[str, Stored]:
    plain: dict[str, Stored] = {}
    for tensors in headers.values():
        for stored, tensor in tensors.items():
            if stored.startswith(VISION):
                continue
            name = stored.removeprefix("model.") if drafter else stored.removeprefix("language_model.")
            if name in plain:
                raise CheckpointError(f"{tensor.file}: {stored} and {plain[name].file}: {plain[name].name} are both {name}")
            plain[name] = tensor
    return plain


def _text_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{folder / 'config.json'}: text_config is {text!r}; expected an object")
    return text


def _check_quantisation(text: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> bool:
    """Whether the config announces INT4 experts; any scheme but the known one is refused by its first differing key."""
    blocks = [c["quantization_config"] for c in (config, text) if c.get("quantization_config") is not None]
    for block in blocks:
        for key, value, known in _quantisation_facts(block):
            if value not in known:
                allowed = " or ".join(repr(x) for x in known)
                raise CheckpointError(
                    f"{folder / 'config.json'}: quantization_config {key} is {value!r}, known is {allowed}; "
                    f"this runtime reads compressed-tensors pack-quantized symmetric INT4 in groups of {GROUP}"
                )
    return bool(blocks)


def _quantisation_facts(block: Any) -> Iterable[tuple[str, Any, tuple[Any, ...]]]:
    """(key, value found, values known) of a quantization_config."""
    block = block if isinstance(block, dict) else {}
    yield "quant_method", block.get("quant_method"), ("compressed-tensors",)
    yield "format", block.get("format"), ("pack-quantized",)
    yield "quantization_status", block.get("quantization_status"), ("compressed", None)
    yield "kv_cache_scheme", block.get("kv_cache_scheme"), (None,)
    groups = block.get("config_groups")
    yield "config_groups", type(groups).__name__ if groups else groups, ("dict",)
    for name, group in groups.items():
        group = group if isinstance(group, dict) else {}
        weights = group["weights"] if isinstance(group.get("weights"), dict) else {}
        known = {"num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",), "group_size": (GROUP,)}
        for key, values in (known | {"actorder": (None,), "dynamic": (False, None)}).items():
            yield f"{name}.weights.{key}", weights.get(key), values
        for key in ("input_activations", "output_activations"):
            yield f"{name}.{key}", group.get(key), (None,)
