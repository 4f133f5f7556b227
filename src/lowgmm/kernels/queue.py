"""Counters of a queue launch: zero when the launch starts and, because the launch resets them, zero when it ends."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor
from triton.runtime import driver

from lowgmm.replay import counted

SLOTS = 1 << 20

ALIGNED = 4
"""Words. Every launch's counters start at a multiple of 16 bytes, or Triton would compile kernels for both cases."""

_arenas: dict[torch.device, Tensor] = {}
_used: dict[torch.device, int] = {}
_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_lock = threading.Lock()
"""Threads with a stream each take from one arena."""


def counters(device: torch.device, words: int = 1) -> Tensor:
    """(words or more,) int32 zeros on ``device`` that no launch running at the same time can touch.

    A stream runs one launch after the other, so its launches share theirs. A captured launch may be replayed on any
    stream, beside any other launch, so it gets its own for good; a graph never runs beside itself. Either way nothing
    needs to be cleared before the launch. Where none are left, or none are there yet (a capture is no time to make
    them), the call gets some that are cleared first, which costs a launch.
    """
    stream = 0 if device.type == "cpu" else driver.active.get_current_stream(device.index)
    return counted(functools.partial(_counters, device, words), stream)


def _counters(device: torch.device, words: int, stream: int) -> Tensor:
    capturing = device.type != "cpu" and torch.cuda.is_current_stream_capturing()
    if not capturing:
        kept = _of_stream.get((device, stream))
        if kept is not None and kept.numel() >= words:
            return kept
        _make_arena(device)
    found = _take(device, words)
    if found is None:
        return torch.zeros(words, dtype=torch.int32, device=device)
    if not capturing:
        _of_stream[device, stream] = found
    return found


def _make_arena(device: torch.device) -> None:
    """The device's arena, if it is not there yet."""
    with _lock:
        if device not in _arenas:
            arena = torch.zeros(SLOTS, dtype=torch.int32, device=device)
            if device.type != "cpu":  # the next call may come on another stream, which does not wait for the zeros
                torch.cuda.current_stream(device).synchronize()
            _arenas[device], _used[device] = arena, 0


def _take(device: torch.device, words: int) -> Tensor | None:
    """So many of the arena's words, for good; None where there are not that many left."""
    with _lock:
        first = _used.get(device, SLOTS)
        if first + words > SLOTS:
            return None
        _used[device] = first + -(-words // ALIGNED) * ALIGNED
        return _arenas[device][first : first + words]
