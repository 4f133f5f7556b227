"""Work of several streams that really runs at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def hold(streams: Sequence[torch.cuda.Stream], products: int = 1) -> None:
    """Let the streams begin together, after so many products of 1.5 ms each.

    Otherwise what is launched first is over before the second launch: kernels of a few µs never meet.
    """
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(products):
        a @ a
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
