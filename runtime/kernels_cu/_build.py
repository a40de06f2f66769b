"""NVRTC to cubin, with a cache that knows every byte the compiler saw.

A kernel is a `.cu` file of this package plus `-D` constants; the only headers are this package's own, given to NVRTC in
memory. The cache key covers source, include closure, options and compiler version, so an edited header never serves an
old cubin. Neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from runtime.env import load_env

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v", "-lineinfo")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """A kernel that does not compile, or compiles with stack or spills."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas reported for one entry."""

    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled source: its machine code, ptxas's report for each entry, the digest of all that went in."""

    code: bytes
    entries: dict[str, Resources]
    digest: str
    log: str


def read_source(name: str) -> str:
    """Text of a file of this package, such as "moe_w4.cu" or "prim/mma.cuh"."""
    return resources.files("runtime.kernels_cu").joinpath(name).read_text()


def include_closure(name: str) -> dict[str, str]:
    """Every file that `name` includes, by its path inside the package; includes inside prim/ are relative to it."""
    found: dict[str, str] = {}
    queue = [name]
    while queue:
        current = queue.pop()
        text = read_source(current)
        folder = current.rpartition("/")[0]
        for include in _INCLUDE.findall(text):
            path = include if include.startswith("prim/") or not folder else f"{folder}/{include}"
            if path == "prim/kcpu.h" or path in found:  # the CPU shim's, never the GPU's
                continue
            found[path] = read_source(path)
            queue.append(path)
    return found


def digest(name: str) -> str:
    """Twelve hex digits of everything that a source is compiled from."""
    parts = [read_source(name), *(text for _, text in sorted(include_closure(name).items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def build(name: str, defines: Mapping[str, int], arch: str, allow_spills: bool = False) -> Cubin:
    """Compiles `name` for `arch`, or takes it from the cache.

    Raises BuildError with NVRTC's log if it does not compile, and unless `allow_spills`, if an entry uses a stack frame
    or spills registers: either means local memory in the main loop.
    """
    source, headers = read_source(name), include_closure(name)
    options = [*OPTIONS, f"-arch={arch}", *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    digest = _digest(name, source, headers, options)
    folder = cache_dir() / f"{name.removesuffix('.cu')}.{digest[:20]}"
    if (folder / "kernel.cubin").exists():
        code, log = (folder / "kernel.cubin").read_bytes(), (folder / "log.txt").read_text()
    else:
        code, log = _compile(name, source, headers, options)
        _store(folder, source, code, log)
    cubin = Cubin(code, parse_log(log), digest, log)
    if not allow_spills:
        check_resources(name, arch, cubin.entries)
        if serial := next((line for line in log.splitlines() if "serialized" in line), ""):  # C7510, C7512, C7515 and their like
            raise BuildError(f"{name} for {arch}: ptxas serialises wgmma: {serial}")
    return cubin


def check_resources(name: str, arch: str, entries: Mapping[str, Resources]) -> None:
    """Raises BuildError for an entry with stack or spills."""
    for entry, used in entries.items():
        if used.stack_bytes or used.spill_bytes:
            raise BuildError(
                f"{name} for {arch}: {entry} uses {used.stack_bytes} bytes of stack and spills {used.spill_bytes} bytes at "
                f"{used.registers} registers; choose a smaller tile"
            )


def parse_log(log: str) -> dict[str, Resources]:
    """ptxas's report in NVRTC's log: registers, stack and spills of every entry."""
    entries: dict[str, Resources] = {}
    name, stack, spill = "", 0, 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'|Function properties for '?([^'\s]+)", line):
            name = found.group(1) or found.group(2)
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(found.group(1)), int(found.group(2)) + int(found.group(3))
        elif found := re.search(r"Used (\d+) registers", line):
            entries[name] = Resources(int(found.group(1)), stack, spill)
            stack, spill = 0, 0
    return entries


def cache_dir() -> Path:
    """$RUNTIME_CACHE_DIR/cubin, else $XDG_CACHE_HOME/runtime/cubin, else ~/.cache/runtime/cubin."""
    if chosen := load_env().cache_dir:
        return Path(chosen) / "cubin"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runtime" / "cubin"


def nvrtc_version() -> tuple[int, int] | None:
    """Version of the NVRTC that can be loaded, None where there is none."""
    try:
        from cuda.bindings import nvrtc

        major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
        return int(major), int(minor)
    except Exception as error:  # bindings absent, or their library: each raises its own type
        absent = ("ModuleNotFoundError", "ImportError", "DynamicLibNotFoundError", "DynamicLibNotAvailableError", "RuntimeError")
        if type(error).__name__ not in absent:
            raise
        return None


def _digest(name: str, source: str, headers: Mapping[str, str], options: list[str]) -> str:
    h = hashlib.sha256()
    for part in (name, source, *(f"{k}\0{v}" for k, v in sorted(headers.items())), *options, str(nvrtc_version())):
        h.update(part.encode() + b"\0")
    return h.hexdigest()


def _compile(name: str, source: str, headers: Mapping[str, str], options: list[str]) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    files = {**headers, **{path.removeprefix("prim/"): text for path, text in headers.items()}}
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source.encode(), name.encode(), len(files), [t.encode() for t in files.values()], [p.encode() for p in files]
        ),
    )
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode(errors="replace").rstrip("\0 \n")
    if int(status):
        raise BuildError(f"{name} ({' '.join(options)}):\n{text}")
    code = b" " * _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code, text


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise BuildError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
    return result[1] if len(result) == 2 else result[1:]


def _store(folder: Path, source: str, code: bytes, log: str) -> None:
    """Writes the cache entry under a temporary name, then renames it: readers see all of it or nothing."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        part = Path(scratch) / "entry"
        part.mkdir()
        (part / "kernel.cu").write_text(source)
        (part / "kernel.cubin").write_bytes(code)
        (part / "log.txt").write_text(log)
        try:
            os.replace(part, folder)
        except OSError:
            if not (folder / "kernel.cubin").exists():  # another process stored the same entry first: as good
                raise
