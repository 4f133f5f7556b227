"""Slots sorted, tokens quantised and gathered in that order: as ``routing.route`` and ``quantize_rows`` have them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lowgmm import routing
from lowgmm.formats import FORMATS
from lowgmm.quant import quantize_rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lowgmm.kernels import arrange as kernels

H, STRIDE = 40, 48
"""Columns of a token, and of the row that it is written to."""

SIZES = {  # T, A, E
    "one token": (1, 8, 128),
    "one slot, one expert": (1, 1, 1),
    "one expert": (9, 2, 1),
    "more slots than experts": (5, 9, 4),
    "odd": (33, 3, 6),
    "most experts without a slot": (10, 1, 1000),
    "as many experts as bins": (30, 3, 16),
}
FORMS = {  # FEW, SUB, STEP, MAX_GROUPS
    "each program looks at all slots": ((128, 1024), 128, 1024, 64),
    "a chunk": ((), 128, 1024, 64),
    "groups of one chunk": ((), 64, 64, 512),
    "groups of several chunks": ((), 64, 128, 512),
    "groups counted in several steps": ((), 64, 64, 1),
}


def check(ids: torch.Tensor, E: int, format: str | None, clip: float | None = None) -> None:
    (T, A), on = ids.shape, ids.device
    fmt = None if format is None else FORMATS[format]
    x = torch.randn(T, 2 * H, device=on).bfloat16()[:, :H]
    x[0, 0] = float("nan")
    x[-1, -1] = float("inf") if T > 1 else 1.0
    written = torch.bfloat16 if fmt is None else fmt.dtype
    untouched = torch.full((T * A, STRIDE), 7.0, device=on).to(written)
    rows, scales = untouched.clone(), torch.full((T * A,), 7.0, device=on)
    number = T + 2 * E + 5
    order, inverse, offsets, zeros = kernels.arrange(ids, x, rows, scales, E, fmt, clip, number)
    made = routing.route(ids, E)
    assert torch.equal(order.long(), made.order)
    assert torch.equal(inverse.long(), made.inverse)
    assert torch.equal(offsets, made.offsets)
    assert zeros.shape == (number,)
    assert not zeros.any()
    assert not kernels.counters(on, 3)[:3].any(), "the gate must be as it was found"

    used = int(made.offsets[-1])
    values, of_token = (x, None) if fmt is None else quantize_rows(x, fmt, clip)
    token = made.tokens[:used]
    want = untouched.clone()
    want[:used, :H] = values[token]
    assert torch.equal(bits(rows), bits(want))
    scale = torch.full((T * A,), 7.0, device=on)
    if of_token is not None:
        scale[:used] = of_token.flatten()[token]
    torch.testing.assert_close(scales, scale, rtol=0, atol=0, equal_nan=True)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int8 if t.element_size() == 1 else torch.int16)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in zip(("FEW", "SUB", "STEP", "MAX_GROUPS"), FORMS[request.param], strict=True):
        monkeypatch.setattr(kernels, name, value)
    return str(request.param)


@pytest.mark.parametrize("size", SIZES)
def test_order_and_rows(form: str, size: str, device: torch.device) -> None:
    T, A, E = SIZES[size]
    for format in ("int8", "fp8", None):
        check(torch.randint(-1, E + 1, (T, A), device=device, dtype=torch.int32), E, format)


@pytest.mark.parametrize(
    "ids",
    [
        [[3, 3], [3, 3], [3, 3]],
        [[-1, -1], [5, 4], [-7, 99]],
        [[2**32, -(2**32)], [2**32 + 1, 2**40], [1, 2**31]],
    ],
    ids=["one expert takes all", "no expert", "wider than 32 bits"],
)
def test_extreme_ids(form: str, ids: list[list[int]], device: torch.device) -> None:
    check(torch.tensor(ids, device=device), 4, "int8")
    check(torch.tensor(ids, device=device), 4, "int8", clip=0.5)


def test_more_groups_than_a_step_of_the_scan(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    E, T, A = 3, 97, 46  # 70 groups of 64; 32 are added up at a time
    for name, value in {"FEW": (), "SUB": 64, "STEP": 64, "MAX_GROUPS": 512}.items():
        monkeypatch.setattr(kernels, name, value)
    check(torch.randint(-1, E + 1, (T, A), device=device), E, "int8")


@pytest.mark.parametrize("E", [1024, 1025])
def test_fewer_groups_at_a_time_of_many_experts(E: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """11 groups; of 1024 experts 8 are added up at a time, of 2048 bins 4."""
    for name, value in {"FEW": (), "SUB": 64, "STEP": 64, "MAX_GROUPS": 512}.items():
        monkeypatch.setattr(kernels, name, value)
    check(torch.randint(E - 5, E + 1, (70, 10), device=device), E, "int8")
    check(torch.full((70, 10), -1, device=device), E, "int8")


@pytest.mark.parametrize(("T", "A", "launches"), [(256, 16, 1), (241, 17, 2)])
def test_one_slot_more_than_few(
    T: int, A: int, launches: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """4096 slots are sorted by whoever gathers, 4097 in a launch of their own: 5 groups, the last of one slot."""
    made, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda kernel, *a, **o: made.append(kernel) or launch(kernel, *a, **o))
    check(torch.randint(-1, 10, (T, A), device=device), 9, "int8")
    assert len(made) == launches


@pytest.mark.parametrize("forms", ["each program looks at all slots", "a chunk"])
def test_wide_tokens(forms: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """More columns than a program takes at a time."""
    monkeypatch.setattr(kernels, "FEW", FORMS[forms][0])
    width = 8500
    x = torch.randn(3, width, device=device).bfloat16()
    ids = torch.tensor([[1, 0], [0, 2], [2, -1]], device=device)
    rows, scales = torch.zeros(6, width + 12, dtype=torch.int8, device=device), torch.zeros(6, device=device)
    order, _, _, _ = kernels.arrange(ids, x, rows, scales, 3, FORMATS["int8"], None, 1)
    values, of_token = quantize_rows(x, FORMATS["int8"])
    assert torch.equal(rows[:5, :width], values[(order[:5] // 2).long()])
    assert torch.equal(scales[:5], of_token.flatten()[(order[:5] // 2).long()])
