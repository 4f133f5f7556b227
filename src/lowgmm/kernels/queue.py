"""Counters of a queue launch: zero when the launch starts and, because the launch resets them, zero when it ends."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import driver

SLOTS = 1 << 20

_arenas: dict[torch.device, Tensor] = {}
_used: dict[torch.device, int] = {}
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device, words: int = 1) -> Tensor:
    """(words or more,) int32 zeros on ``device`` that no launch running at the same time can touch.

    A stream runs one launch after the other, so its launches share theirs. A captured launch may be replayed on any
    stream, beside any other launch, so it gets its own for good; a graph never runs beside itself. Either way nothing
    needs to be cleared before the launch. Where none are left, or none are there yet (a capture is no time to make
    them), the call gets some that are cleared first, which costs a launch.
    """
    on_gpu = device.type != "cpu"
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    stream = driver.active.get_current_stream(device.index) if on_gpu else 0
    if not capturing:
        kept = _of_stream.get((device, stream))
        if kept is not None and kept.numel() >= words:
            return kept
        if device not in _arenas:
            _arenas[device], _used[device] = torch.zeros(SLOTS, dtype=torch.int32, device=device), 0
    first = _used.get(device, SLOTS)
    if first + words > SLOTS:
        return torch.zeros(words, dtype=torch.int32, device=device)
    _used[device] = first + words
    found = _arenas[device][first : first + words]
    if not capturing:
        _of_stream[device, stream] = found
    return found
