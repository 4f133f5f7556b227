"""The counter of a queue launch: zero when the launch starts and, because the launch resets it, zero when it ends."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import driver

SLOTS = 1 << 14

_arenas: dict[torch.device, Tensor] = {}
_used: dict[torch.device, int] = {}
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


def ticket(device: torch.device) -> Tensor:
    """(1,) int32 zero on ``device`` that no launch running at the same time can draw from.

    A stream runs one launch after the other, so its launches share a counter. A captured launch may be replayed on any
    stream, beside any other launch, so it gets a counter for good; a graph never runs beside itself. Either way nothing
    needs to be cleared before the launch. Where there is no counter left, or none yet (a capture is no time to make
    them), the call gets one that is cleared first, which costs a launch.
    """
    on_gpu = device.type != "cpu"
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    stream = driver.active.get_current_stream(device.index) if on_gpu else 0
    if not capturing and (counter := _of_stream.get((device, stream))) is not None:
        return counter
    if not capturing and device not in _arenas:
        _arenas[device], _used[device] = torch.zeros(SLOTS, dtype=torch.int32, device=device), 0
    slot = _used.get(device, SLOTS)
    if slot == SLOTS:
        return torch.zeros(1, dtype=torch.int32, device=device)
    _used[device] = slot + 1
    counter = _arenas[device][slot : slot + 1]
    if not capturing:
        _of_stream[device, stream] = counter
    return counter
