"""What a measurement was taken on (hardware, clocks, versions, commit), and how measurements are written down."""

from __future__ import annotations

import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from typing import Any

import torch

GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
"""What nvidia-smi is asked for. MHz, W and degrees Celsius."""


def record(device: torch.device) -> dict[str, Any]:
    """The environment of a measurement as a flat dictionary; what cannot be found out is left out, never guessed.

    >>> found = record(torch.device("cpu"))
    >>> found["device"], "torch" in found
    ('cpu', True)
    """
    found: dict[str, Any] = {
        "device": str(device),
        "device_name": device_name(device),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    found |= {p: v for p in ("lowgmm", "triton", "transformers") if (v := _version(p)) is not None}
    found["torch"] = torch.__version__  # names the build (+cpu, +cu130), which the package's metadata may not
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found |= {f"gpu.{k}": v for k, v in _nvidia_smi(device).items()}
    if (commit := _commit()) is not None:
        found["commit"] = commit
    return found


def device_name(device: torch.device) -> str:
    """A GPU's name, or the CPU's with its number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """The command's output, or None where the program is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _nvidia_smi(device: torch.device) -> dict[str, str]:
    # By UUID: torch's index counts the visible devices, nvidia-smi's counts all of them.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid is not None else []
    out = _run("nvidia-smi", *which, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    if not out:
        return {}
    return dict(zip(GPU_FIELDS, (v.strip() for v in out.splitlines()[0].split(",")), strict=False))


def _commit() -> str | None:
    """What LOWGMM_COMMIT says, for copies of a checkout; else the commit that this file is of, with a mark for
    uncommitted changes."""
    if named := os.environ.get("LOWGMM_COMMIT"):
        return named
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _run("git", "-C", os.fspath(root), "rev-parse", "HEAD")
    changed = _run("git", "-C", os.fspath(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def write_json(path: pathlib.Path, data: Any) -> None:
    """Write ``data`` so that ``path`` is at every moment either what it was or complete: a temporary file beside it,
    then a rename.

    NaN and infinity, which JSON does not have, are written as null.
    """
    text = json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)  # mkstemp's files are the owner's alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
