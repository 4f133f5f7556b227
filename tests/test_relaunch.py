"""Launching again without Triton's binder: only what was bound under the same key, and only with aligned pointers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowgmm import relaunch
from lowgmm.relaunch import Relauncher


class Kernel:
    """Stands for a Triton kernel: notes what is bound, and gives out something that notes what is launched."""

    def __init__(self, returns: bool = True) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.returns = returns

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.log.append(("bound", grid, arguments, options))
            return Compiled(self.log) if self.returns else None

        return run


class Compiled:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.log.append(("launched", grid, arguments))


def test_the_second_launch_of_a_key_skips_the_binder():
    kernel, x = Kernel(), torch.zeros(8)
    launch = Relauncher(kernel)
    launch(3, ("a", 1), [x, None], (x, None, 5), num_warps=4)
    launch(9, ("a", 1), [x, None], (x, None, 6), num_warps=4)
    launch(9, ("a", 2), [x, None], (x, None, 6), num_warps=8)
    assert kernel.log == [
        ("bound", (3,), (x, None, 5), {"num_warps": 4}),
        ("launched", (9, 1, 1), (x, None, 6)),
        ("bound", (9,), (x, None, 6), {"num_warps": 8}),
    ]


def test_a_pointer_that_is_not_aligned_is_left_to_triton_and_not_remembered():
    kernel, x = Kernel(), torch.zeros(8)
    launch = Relauncher(kernel)
    launch(1, "k", [x[1:]], (x[1:],))
    launch(1, "k", [x], (x,))
    launch(1, "k", [x, x[1:]], (x, x[1:]))
    launch(1, "k", [x], (x,))
    assert [entry[0] for entry in kernel.log] == ["bound", "bound", "bound", "launched"]


def test_which_pointers_are_none_belongs_to_the_key():
    kernel, x = Kernel(), torch.zeros(8)
    launch = Relauncher(kernel)
    for pointers in ([x, None], [None, x], [x, x], [None, None]) * 2:
        launch(1, "k", pointers, tuple(pointers))
    assert [entry[0] for entry in kernel.log] == ["bound"] * 4 + ["launched"] * 4


def test_what_cannot_be_launched_again_is_bound_every_time():
    kernel = Kernel(returns=False)  # as in Triton's interpreter
    launch = Relauncher(kernel)
    for _ in range(2):
        launch(1, "k", [], ())
    assert [entry[0] for entry in kernel.log] == ["bound", "bound"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relaunch, "MOST", 3)
    launch = Relauncher(Kernel())
    for key in range(10):
        launch(1, key, [], ())
        assert len(launch.bound) <= 3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_real_kernel_gives_the_same_bits_either_way(device: torch.device):
    from relaunch_kernel import scale

    launch = Relauncher(scale)
    for n in (100, 1000, 64):
        x = torch.arange(n, device=device, dtype=torch.float32)
        y = torch.zeros_like(x)
        launch(-(-n // 128), "float32", [x, y], (x, y, n, 3, 128), num_warps=4)
        assert torch.equal(y, x * 3)
    assert len(launch.bound) == (1 if device.type == "cuda" else 0)
