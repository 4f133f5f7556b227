"""What measurements say about tile configurations: the tables shipped with the package, and the user's own on disk.

Configurations are strings here (``str(TileConfig)``), so that nothing below the tuner is needed to read a table.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lowgmm import environment

VERSION = 1
"""Of the files' layout."""

DEFAULT = "NVIDIA H200"
"""The GPU whose rates and candidates serve where no other was measured."""

Measured = dict[str, str]
"""Problem key -> configuration."""


@dataclass(frozen=True)
class Rates:
    """A GPU in the cost model's terms: seconds, bytes and FLOP, of one SM where not said otherwise."""

    launch: float
    """Seconds before the first and after the last tile."""
    dram: float
    """Bytes/s of the whole GPU."""
    l2: float
    """Bytes/s from L2 into an SM's shared memory."""
    latency: float
    """Seconds from a load to its data; a pipeline of s stages waits at least latency / (s - 1) per step."""
    mma: float
    """FLOP/s of the 8-bit matrix instruction; operands of 16 bits take twice as long."""
    narrow: float
    """Columns below which the matrix instruction is no faster: it waits for its M-side operand."""
    step: float
    """Seconds per step over K that a program spends at barriers; another program of its SM computes meanwhile."""
    promote: float
    """Seconds to promote 128 elements of an FP8 accumulator to FP32."""
    tile: float
    """Seconds per tile to find it and to fill its pipeline."""
    store: float
    """Bytes/s of a program's epilogue."""
    overlap: float
    """Share of a tile's fixed costs that a persistent program still sees: its next tile's loads are under way."""
    blend: float
    """Exponent that joins memory and SM time: infinity means the larger, 1 their sum."""


@dataclass(frozen=True)
class Shipped:
    """A GPU's table as the package ships it, written by ``bench/fit.py`` from a sweep."""

    gpu: str
    source: Mapping[str, str]
    """The sweep's file, commit and versions."""
    rates: Rates
    factors: Mapping[str, Mapping[str, float]]
    """By format and configuration: what the modelled SM time has to be multiplied by."""
    candidates: Mapping[str, tuple[str, ...]]
    """By format: what ``pick`` chooses from."""
    measured: Measured = field(default_factory=dict)


def slug(gpu: str) -> str:
    """A GPU's name as a file name: ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@functools.cache
def shipped(gpu: str) -> Shipped | None:
    """The package's table for exactly this GPU, or None. A broken one is a defect of the package, so it raises."""
    path = Path(__file__).parent / "measured" / f"{slug(gpu)}.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["version"] == VERSION, f"{path.name} has version {data['version']}, expected {VERSION}"
    return Shipped(
        gpu=data["gpu"],
        source=data["source"],
        rates=Rates(**data["rates"]),
        factors=data["factors"],
        candidates={name: tuple(texts) for name, texts in data["candidates"].items()},
        measured=data["measured"],
    )


def nearest(gpu: str) -> Shipped:
    """The GPU's own table, or the one that serves where no other was measured."""
    table = shipped(gpu) or shipped(DEFAULT)
    assert table is not None, f"the package lacks its table for {DEFAULT}"
    return table


# the user's cache


def folder() -> Path:
    """``LOWGMM_CACHE``, else ``lowgmm`` in the user's cache directory (XDG)."""
    if chosen := os.environ.get("LOWGMM_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "lowgmm"


def path_for(gpu: str) -> Path:
    """Where the measurements of this GPU are kept."""
    return folder() / f"tune_{slug(gpu)}.json"


def versions() -> dict[str, str]:
    """What a measurement is valid for: another Triton compiles other code, another lowgmm has other kernels."""
    found = {}
    for package in ("lowgmm", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


@functools.cache
def user(gpu: str) -> Measured:
    """The user's measurements of this GPU; empty where there are none. A file that cannot be used is named in a
    warning."""
    path = path_for(gpu)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"cannot be read ({error})", path)
        return {}
    try:
        data = json.loads(text)
        measured = _checked(data, gpu)
    except ValueError as error:
        _warn(str(error), path)
        return {}
    return measured


def _checked(data: Any, gpu: str) -> Measured:
    """The file's entries, or a ValueError that says what is wrong with it."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"is not a tuning file of version {VERSION}")
    if data.get("gpu") != gpu:
        raise ValueError(f"holds measurements of {data.get('gpu')!r}, not of {gpu!r}")
    if (have := data.get("versions")) != (want := versions()):
        raise ValueError(f"was measured with {have}, this is {want}")
    entries = data.get("measured")
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise ValueError("has no table of measurements")
    texts = {name: entry.get("config") for name, entry in entries.items()}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("has entries without a configuration")
    return {name: str(text) for name, text in texts.items()}


def _warn(why: str, path: Path | None) -> None:
    warnings.warn(f"lowgmm: tuning file {path or ''} {why}; it is ignored. `lowgmm tune` writes it anew.", stacklevel=3)


def store(gpu: str, entries: Mapping[str, Mapping[str, Any]]) -> Path:
    """Add measurements (key -> {"config": …, "us": …, …}) to the user's file, which is never half written.

    Entries of a file that cannot be used are dropped; a warning has named it. Two tuners at once: the last one's file
    stays, whole.
    """
    path = path_for(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    user.cache_clear()
    before: dict[str, Any] = {}
    if user(gpu):
        before = json.loads(path.read_text(encoding="utf-8"))["measured"]
    data = {"version": VERSION, "gpu": gpu, "versions": versions(), "measured": {**before, **entries}}
    environment.write_json(path, data)
    user.cache_clear()
    return path
