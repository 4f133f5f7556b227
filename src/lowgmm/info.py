"""What lowgmm runs on here, for people: the text of ``lowgmm info``."""

from __future__ import annotations

import os
import platform

import torch

from lowgmm import cpu, environment, native
from lowgmm.formats import FP8, GROUPS
from lowgmm.gpu import describe


def collect() -> dict[str, str]:
    """Lines of name and value.

    >>> found = collect()
    >>> found["torch"] == torch.__version__, "INT8" in found["CPU"]
    (True, True)
    """
    there = environment.record(torch.device("cpu"))
    found = {
        "lowgmm": str(there.get("lowgmm", "not installed: run from a source tree")),
        "torch": torch.__version__,
        "triton": str(there.get("triton", "not installed: no GPU kernels")),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "processor": str(there["cpu"]),
        "threads": f"{torch.get_num_threads()} (torch.set_num_threads), {_cores()} cores for this process",
        "CPU": _cpu(),
        "GPU": "none that torch sees" if not torch.cuda.is_available() else "",
    }
    for index in range(torch.cuda.device_count()):
        gpu = describe(torch.device("cuda", index))
        lacks = gpu.lacks(FP8)
        found[f"GPU {index}"] = f"{gpu.name}, {gpu.sms} SMs, INT8, INT4" + (", FP8" if lacks is None else f"; {lacks}")
    return {name: value for name, value in found.items() if value}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    groups = ", ".join(map(str, GROUPS))
    if native.library() is not None:
        return f"INT8 and INT4 (groups of {groups}): {cpu.int8_backend()}; FP8 widened to FP32, slow"
    return f"INT8: {cpu.int8_backend()}; INT4 unpacked expert by expert, slow; FP8 widened to FP32, slow"
