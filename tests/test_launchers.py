"""Triton's launchers, called directly: the driver is handed what the documented way hands it; nobody is passed over."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowgmm import relaunch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

CASES = {
    "gmm int8": 1,
    "gmm fp8, bias": 1,
    "gmm int8, quantised here": 2,
    "gmm bfloat16, portable": 1,
    "gmm int8, by pointers": 1,
    "layer, few tokens": 3,
    "layer, many tokens": 4,
    "layer, bfloat16": 3,
    "layer, portable": 3,
    "layer, gathered": 4,
    "layer, one token": 1,
    "layer, one token, portable": 1,
}
"""Of ``gpuless_launch.py``, and their launches."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a driver is there")
def test_a_replay_hands_the_driver_what_the_documented_way_does():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("gpuless_launch.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["case"]: line["replays"] for line in found} == CASES
    for line in found:
        assert line["replayed"] == line["in full"], line["case"]
        assert line["kept"] == 0, line["case"]
    maps = [value for line in found for made in line["replayed"] for value in made["values"] if value[0] == "map"]
    assert len(maps) > 20
    assert {launch["stream"] for line in found for launch in line["replayed"]} == {7}
    assert {launch["attributes"] for line in found for launch in line["replayed"]} == {0, 1}


def test_hooks_are_honoured():
    from triton import knobs

    assert not relaunch.hooked()
    seen: list[Any] = []
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(seen.append)
        try:
            assert relaunch.hooked()
        finally:
            hook.remove(seen.append)
    assert not relaunch.hooked()


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0"])
def test_no_launcher_is_guessed(monkeypatch: pytest.MonkeyPatch, version: str):
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    run = object.__new__(CudaLauncher)
    run.__dict__.update(global_scratch_size=0, profile_scratch_size=0, launch=print, launch_cooperative_grid=False)
    run.__dict__.update(launch_pdl=True)
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert relaunch.start_of(compiled) is not None
    monkeypatch.setattr(triton, "__version__", version)
    assert relaunch.start_of(compiled) is None
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    run.global_scratch_size = 128
    assert relaunch.start_of(compiled) is None, "Triton takes memory at every launch"
    assert relaunch.start_of(SimpleNamespace(run=print)) is None
    assert relaunch.start_of(None) is None
