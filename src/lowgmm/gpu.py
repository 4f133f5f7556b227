"""Facts about a GPU, as data. Everything that decides something from the hardware asks here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from lowgmm.formats import QuantFormat


@dataclass(frozen=True)
class Gpu:
    """What kernels and the tuner need to know about a device; a fake one serves on machines without a GPU."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_memory: int
    """Bytes one block can use (the opt-in maximum)."""
    backend: str = "cuda"
    interpreted: bool = False
    """Triton's interpreter imitates it."""

    @property
    def tma(self) -> bool:
        """Tensor memory accelerator: Hopper and newer."""
        return self.backend == "cuda" and self.capability >= (9, 0)

    @property
    def fnuz(self) -> bool:
        """Its FP8 is e4m3fnuz (MI300), not e4m3fn: other bits for the same numbers."""
        return self.backend == "hip" and self.capability == (9, 4)

    def lacks(self, fmt: QuantFormat | None) -> str | None:
        """Why ``fmt`` cannot be multiplied here, or None if it can."""
        if fmt is not None and not fmt.exact and self.backend == "cuda" and self.capability < (8, 9):
            major, minor = self.capability
            return (
                f"{self.name} (sm_{major}{minor}) has no FP8 matrix instruction (Ada, sm_89, is the first); "
                f"quantise to 'int8' instead, or multiply lowgmm.dequantize(weights) in 16 bits."
            )
        return None


H200 = Gpu("NVIDIA H200", (9, 0), sms=132, shared_memory=232_448)


def describe(device: torch.device) -> Gpu:
    """The facts of a CUDA device. A CPU device stands for an H200, which Triton's interpreter then imitates."""
    if device.type != "cuda":
        return INTERPRETED
    return _describe(torch.cuda.current_device() if device.index is None else device.index)


INTERPRETED = replace(H200, interpreted=True)


@functools.cache
def _describe(index: int) -> Gpu:
    p = torch.cuda.get_device_properties(index)
    backend = "hip" if torch.version.hip else "cuda"
    shared = getattr(p, "shared_memory_per_block_optin", p.shared_memory_per_block)
    return Gpu(p.name, (p.major, p.minor), p.multi_processor_count, shared, backend)
