"""Where kernels run: on the CUDA device where there is one, and else in Triton's interpreter.

The interpreter is chosen by an environment variable that `@triton.jit` reads as a kernel is defined, so this file has
to run before anything imports Triton. The same `pytest` command then serves both kinds of machine.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None

# What a developer has tuned must not decide what the tests run.
os.environ["LOWGMM_CACHE"] = os.path.join(os.path.dirname(__file__), "no-such-folder")

if not HAS_CUDA:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before tests/conftest.py could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    if HAS_TRITON:
        import interpreter_repair

        interpreter_repair.install()


def pytest_report_header() -> str:
    if HAS_CUDA:
        return f"kernels: compiled, on {torch.cuda.get_device_name()}"
    return "kernels: Triton's interpreter, repaired" if HAS_TRITON else "kernels: not run (no CUDA device, no Triton)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("interpreter"):
            if HAS_CUDA:
                item.add_marker(pytest.mark.skip(reason="kernels run on the CUDA device, not in the interpreter"))
            elif not HAS_TRITON:
                item.add_marker(pytest.mark.skip(reason="Triton is not installed"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this session: the CUDA device, or the CPU with Triton's interpreter."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


SEED = 20_240_607


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every test draws the same numbers, alone or among others, on any machine."""
    torch.manual_seed(SEED)


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator with that seed, for tests that draw from one of their own."""
    return torch.Generator().manual_seed(SEED)


@pytest.fixture
def watchdog() -> Iterator[None]:
    """End the process if a test hangs: nothing less stops a kernel that never returns."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["native", "onednn"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which form CPU weights are packed into; native only where it was built and the CPU can run it."""
    from lowgmm import native

    if request.param == "onednn":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("the native code was not built or cannot run here")
    return str(request.param)
