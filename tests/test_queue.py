"""The counters of queue launches: never the same words for two launches that may run at once."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

CPU = torch.device("cpu")


class Slow(dict[torch.device, int]):
    """Reading it takes so long that other threads read the same."""

    def get(self, key: torch.device, default: int = 0) -> int:  # type: ignore[override]
        value = super().get(key, default)
        time.sleep(0.002)
        return value


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    from lowgmm.kernels import queue

    words = torch.zeros(queue.SLOTS, dtype=torch.int32)
    monkeypatch.setattr(queue, "_arenas", {CPU: words})
    monkeypatch.setattr(queue, "_used", Slow({CPU: 0}))
    monkeypatch.setattr(queue, "_of_stream", {})
    return words


def test_threads_get_words_of_their_own(arena: Tensor) -> None:
    from lowgmm.kernels import queue

    with ThreadPoolExecutor(8) as pool:
        taken = [t for t in pool.map(lambda n: queue._take(CPU, n), [1, 5, 2, 9] * 4) if t is not None]
    assert len(taken) == 16
    taken.sort(key=Tensor.data_ptr)
    assert all(a.data_ptr() + a.nbytes <= b.data_ptr() for a, b in pairwise(taken))
    assert {(t.data_ptr() - arena.data_ptr()) % 16 for t in taken} == {0}


def test_a_stream_keeps_its_words_until_it_needs_more(arena: Tensor) -> None:
    from lowgmm.kernels import queue

    first = queue.counters(CPU, 2)
    assert queue.counters(CPU) is first
    larger = queue.counters(CPU, 100)
    assert larger.numel() >= 100
    assert queue.counters(CPU, 7) is larger


def test_a_full_arena_gives_words_that_are_cleared_for_the_call(arena: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowgmm.kernels import queue

    arena.fill_(7)
    monkeypatch.setattr(queue, "_used", {CPU: queue.SLOTS - 4})
    found = queue.counters(CPU, 5)
    assert found.tolist() == [0] * 5
    assert queue.counters(CPU, 5) is not found
