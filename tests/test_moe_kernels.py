"""The layer's kernels, in each way to launch them: right, the same bits every time, and never waiting for ever."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm import plan
from lowgmm.formats import QuantTensor
from lowgmm.gpu import H200
from lowgmm.plan import LayerConfig, LayerProblem
from lowgmm.shapes import UnsupportedError
from test_cases_support import KERNELS, check_layer
from test_moe import Arguments, make
from test_moe_options import OPTIONS, arguments

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lowgmm.kernels.tiles import BAND

DEVICE = KERNELS.device
LAUNCHES = {
    "queue": "queue-16-32x64-32x64-swap-4w2s3t",
    "queue, tokens on the M side": "queue-16-32x64-32x64-4w2s3t",
    "queue, TMA": "queue-16-32x64-32x64-swap-tma-pre-4w2s3t",
    "queue, 32 rows": "queue-32-16x64-64x32-swap-4w2s3t",
    "split": "split-16-32x64-32x64-4w2s3t",
    "split, gathered": "split-16-32x64-32x64-gather-4w2s3t",
    "split, gathered, TMA": "split-16-32x64-32x64-tma-gather-4w2s3t",
    "split, TMA, swapped": "split-16-32x64-32x64-swap-tma-4w2s3t",
}
DIRECT = ("direct-16-32x64-32x64-swap-4w2s3t", "direct-16-16x32-64x64-swap-tma-pre-4w2s3t")
IDS = [[0, 3], [1, -1], [2, 2], [3, 0], [-1, 9], [3, 1]]


def layer(*args: Any, config: LayerConfig | str, **options: Any) -> Tensor:
    return lowgmm.moe_ffn(*args, impl="triton", config=config, **options)


OPERANDS = [(f, d) for f in ("int8", "fp8") for d in (torch.bfloat16, torch.float32, torch.float16)]
"""Formats and dtypes of hidden; unquantised weights have kernels in bf16 only: test_what_has_no_kernels."""


def can_run(launch: str, format: str | None) -> bool:
    return format is not None or "gather" not in launch


@pytest.mark.parametrize(
    ("launch", "format", "dtype"),
    [(at, *o) for at in LAUNCHES for o in [*OPERANDS, (None, torch.bfloat16)] if can_run(at, o[0])],
    ids=str,
)
def test_launches(launch: str, format: str | None, dtype: torch.dtype) -> None:
    args = make(format, dtype, torch.tensor(IDS), 4, DEVICE, (6, 64, 96))
    check_layer(layer(*args, config=LAUNCHES[launch]), *args)


@pytest.mark.parametrize(
    ("launch", "format"),
    [(at, f) for at in LAUNCHES if "TMA" not in at for f in ("int8", "fp8", None) if can_run(at, f)],
    ids=str,
)
def test_odd_sizes(launch: str, format: str | None) -> None:
    """H, I and columns that no tile divides; more row tiles than one for an expert."""
    ids = torch.tensor([[1, 0], [1, 2]] * 10 + [[1, 1]])
    args = make(format, torch.bfloat16, ids, 3, DEVICE, (len(ids), 50, 45))
    check_layer(layer(*args, config=LAUNCHES[launch]), *args)


@pytest.mark.parametrize("launch", ["queue", "split, gathered"])
def test_bands_of_row_tiles(launch: str) -> None:
    """An expert of more row tiles than a band, behind one of few: every tile of it once, in both products."""
    rows = (BAND.value + 2) * 16 + 1
    ids = torch.arange(rows + 20).lt(20).logical_not().long().unsqueeze(1)
    args = make("int8", torch.bfloat16, ids, 2, DEVICE, (len(ids), 64, 48))
    check_layer(layer(*args, config=LAUNCHES[launch]), *args)


@pytest.mark.parametrize("ids", [[1, 2], [-1, 3], [-1, 7], [2, 2], [1], [-1], [3, 0, -1, 3]], ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
@pytest.mark.parametrize("config", DIRECT)
def test_direct(config: str, format: str | None, ids: list[int]) -> None:
    """One token in one launch."""
    args = make(format, torch.bfloat16, torch.tensor([ids]), 4, DEVICE, (1, 64, 96))
    check_layer(layer(*args, config=config), *args)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("launch", ["queue", "split", "direct"])
def test_options(launch: str, name: str, format: str) -> None:
    args, options = arguments(format, name, DEVICE, torch.bfloat16)
    config = DIRECT[0] if launch == "direct" else LAUNCHES[launch]
    if launch == "direct":
        args = (args[0][:1], *args[1:3], *(t[:1] for t in args[3:]))
    check_layer(layer(*args, config=config, **options), *args, **options)


def test_a_configuration_or_its_string() -> None:
    args = make("int8", torch.bfloat16, torch.tensor(IDS), 4, DEVICE, (6, 64, 96))
    text = LAUNCHES["queue"]
    assert torch.equal(layer(*args, config=LayerConfig.parse(text)), layer(*args, config=text))


def as_bits(launches: dict[str, str], args: Arguments) -> list[Tensor]:
    return [layer(*args, config=config).view(torch.int16) for config in launches.values()]


@pytest.mark.parametrize("format", ["int8"])
def test_launches_agree_bit_by_bit(format: str) -> None:
    """Exact sums, and one order of rounding: how the layer is launched changes nothing."""
    args = make(format, torch.bfloat16, torch.tensor(IDS), 4, DEVICE, (6, 64, 96))
    first, *others = as_bits(LAUNCHES, args)
    assert all(torch.equal(other, first) for other in others)
    one = tuple(t[:1] for t in (args[0], *args[3:]))
    single = layer(one[0], *args[1:3], *one[1:], config=DIRECT[0])
    assert torch.equal(single.view(torch.int16), first[:1])


@pytest.mark.parametrize("tokens", [6, 1])
def test_launches_agree_with_one_expert_per_token(tokens: int) -> None:
    """Where no sum over slots follows, an expert's output is rounded all the same before its weight is applied."""
    args = make("int8", torch.bfloat16, torch.tensor(IDS)[:tokens, :1], 4, DEVICE, (tokens, 64, 96))
    configs = LAUNCHES if tokens > 1 else {**LAUNCHES, **{text: text for text in DIRECT}}
    first, *others = as_bits(configs, args)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("launch", ["queue", "split"])
def test_a_token_does_not_depend_on_the_others(launch: str) -> None:
    """Nor on their order: its rows are quantised and summed alone, and its slots are added in slot order."""
    args = make("fp8", torch.bfloat16, torch.tensor(IDS), 4, DEVICE, (6, 64, 96))
    hidden, w13, w2, ids, weights = args
    together = layer(*args, config=LAUNCHES[launch])
    for order in ([5, 4, 3, 2, 1, 0], [2], [3, 0]):
        some = layer(hidden[order], w13, w2, ids[order], weights[order], config=LAUNCHES[launch])
        assert torch.equal(some.view(torch.int16), together[order].view(torch.int16))


def test_tokens_without_an_expert_are_zero() -> None:
    hidden, w13, w2, _, weights = make("int8", torch.bfloat16, None, 4, DEVICE, (6, 64, 96))
    for ids in ([[-1], [2], [4], [0], [-9], [3]], [[-1, -1], [2, -1], [4, 9], [0, 1], [-9, 7], [3, 3]]):
        given = torch.tensor(ids, device=DEVICE)
        nothing = ((given < 0) | (given >= 4)).all(1)
        # The weights of such slots may be anything.
        w = weights[:, : given.shape[1]].masked_fill(((given < 0) | (given >= 4)), float("nan"))
        for config in LAUNCHES.values():
            y = layer(hidden, w13, w2, given, w, config=config)
            assert not y[nothing].any()
            assert bool(y[~nothing].isfinite().all())
            assert bool(y[~nothing].any(1).all())


@pytest.mark.parametrize("config", [LAUNCHES["queue"], DIRECT[0]])
def test_ids_beyond_32_bits_are_no_ids(config: str) -> None:
    """2³² + 1 is not expert 1."""
    args = make("int8", torch.bfloat16, torch.tensor([[1, 2**32 + 1]]), 4, DEVICE, (1, 64, 96))
    check_layer(layer(*args, config=config), *args)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_nan_stays_in_its_token(launch: str) -> None:
    args = make("int8", torch.bfloat16, torch.tensor(IDS), 4, DEVICE, (6, 64, 96))
    clean = layer(*args, config=LAUNCHES[launch])
    hidden = args[0].clone()
    hidden[3, 7] = float("nan")
    y = layer(hidden, *args[1:], config=LAUNCHES[launch])
    assert bool(y[3].isnan().all())
    assert torch.equal(y[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


# ---- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
@pytest.mark.parametrize("launch", ["queue", "split", "direct"])
def test_any_number_of_programs(launch: str, programs: int) -> None:
    """One program does everything itself; with 132 most find the queue empty. Twice, because counters must be back at
    zero."""
    tokens = 1 if launch == "direct" else 6
    args = make("int8", torch.bfloat16, torch.tensor(IDS[:tokens]), 4, DEVICE, (tokens, 64, 96))
    text = DIRECT[0] if launch == "direct" else LAUNCHES[launch]
    config = text.replace("s3t", f"s{programs}t")
    for _ in range(2):
        check_layer(layer(*args, config=config), *args)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_direct_launch_leaves_its_workspace_as_it_found_it(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowgmm.kernels import run_layer

    kept = torch.zeros(1 << 12, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(run_layer, "counters", lambda device, words: kept[:words])
    args = make("int8", torch.bfloat16, torch.tensor(IDS[:1])[:, :top_k], 4, DEVICE, (1, 64, 96))
    args = (*args[:4], args[4][:, :top_k])
    results = []
    for config in (*DIRECT, DIRECT[0]):
        results.append(layer(*args, config=config))
        assert not kept.any()
    assert torch.equal(results[0], results[2])


def run_queue(programs: int, up: int, down_of: list[list[int]], schedule: random.Random) -> tuple[int, list[int]]:
    """The queue's protocol with ``programs`` interleaved at random; returns the ticket's last value and the order in
    which tasks ended.

    ``down_of[j]`` names the gate/up tasks that down task j waits for. A program draws a ticket ahead while it works,
    as the kernel does. Raises if no program can move.
    """
    total, ticket = up + len(down_of), 0
    ended: list[int] = []
    state: list[tuple[int, int] | None] = [None] * programs  # (task, next task); None: not started yet

    def draw() -> int:
        nonlocal ticket
        ticket += 1
        return ticket - 1

    running = set(range(programs))
    while running:
        order = sorted(running)
        schedule.shuffle(order)
        for p in order:
            now = state[p]
            if now is None:
                task = draw()
                if task >= total:
                    running.discard(p)
                    break
                state[p] = (task, draw())
                break
            task, following = now
            if task < up or set(down_of[task - up]) <= set(ended):
                ended.append(task)
                if following >= total:
                    running.discard(p)
                else:
                    state[p] = (following, draw())
                break
        else:
            raise AssertionError("deadlock: every program waits")
    return ticket, ended


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
def test_the_protocol_under_any_interleaving(programs: int) -> None:
    """What the kernel's docstring argues: it ends, each task runs once, and the highest ticket is known."""
    for seed in range(50):
        schedule = random.Random(seed)
        blocks, per_block = schedule.randint(1, 6), schedule.randint(1, 5)
        up = blocks * per_block
        waits = [list(range(b * per_block, (b + 1) * per_block)) for b in range(blocks) for _ in range(3)]
        ticket, ended = run_queue(programs, up, waits, schedule)
        assert sorted(ended) == list(range(up + len(waits)))
        assert ticket == up + len(waits) + programs


def test_a_protocol_that_can_hang_is_caught() -> None:
    """A down task ahead of the gate/up task it waits for, and two programs that both hold such tasks."""
    with pytest.raises(AssertionError, match="deadlock"):
        run_queue(1, 1, [[1], [0]], random.Random(0))


# ---- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*LAUNCHES.values(), *DIRECT, "queue-16-64x256-128x256-swap-tma-ws-4w6s1p"])
def test_a_configuration_survives_its_string(config: str) -> None:
    assert str(LayerConfig.parse(config)) == config


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "not a configuration": ("16x32x64", {}, "is not a layer configuration"),
    "a launch of gmm's": ("grid-16-32x64-32x64-4w2s3t", {}, "is not a layer configuration"),
    "no programs": ("queue-16-32x64-32x64-4w2s0p", {}, "is not a layer configuration"),
    "a tile of 24": ("queue-24-32x64-32x64-4w2s3t", {}, "powers of two"),
    "direct for six tokens": (DIRECT[0], {}, "one token"),
    "warp-specialised, 8 warps": ("queue-16-64x256-128x256-swap-tma-ws-8w4s1p", {}, "warp-specialised"),
    "too large": ("queue-128-256x256-256x256-8w4s3t", {}, "bytes of shared memory"),
    "group128 across groups": ("queue-16-32x64-32x256-4w2s3t", {"requantize": "group128"}, "at most 128"),
    "gather for one token": ("direct-16-32x64-32x64-swap-gather-4w2s3t", {}, "one token"),
    "TMA on odd rows": ("queue-16-32x64-32x64-swap-tma-4w2s3t", {"H": 50}, "multiple of 16 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused(name: str) -> None:
    config, changes, message = REFUSED[name]
    args = make("int8", torch.bfloat16, torch.tensor(IDS), 4, DEVICE, (6, changes.pop("H", 64), 96))
    with pytest.raises(UnsupportedError, match=message):
        layer(*args, config=config, **changes)


def test_what_has_no_kernels() -> None:
    """fp16 and fp32 weights, and two formats in one layer, run as a sequence of operations; a forced one is refused."""
    hidden, w13, w2, ids, weights = make(None, torch.float32, torch.tensor(IDS), 4, DEVICE, (6, 64, 96))
    assert isinstance(w2, Tensor)
    with pytest.raises(UnsupportedError, match=r"not torch\.float32"):
        layer(hidden, w13, w2, ids, weights, config=LAUNCHES["queue"])
    check_layer(lowgmm.moe_ffn(hidden, w13, w2, ids, weights, impl="triton"), hidden, w13, w2, ids, weights)
    mixed = (hidden, lowgmm.quantize(w13, "fp8"), lowgmm.quantize(w2, "int8"), ids, weights)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="different dtypes"):
        layer(*mixed, config=LAUNCHES["queue"])
    assert isinstance(mixed[1], QuantTensor)
    check_layer(lowgmm.moe_ffn(*mixed, impl="triton"), *mixed)


@pytest.mark.parametrize("requantize", ["token", "group128", "static"])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_something_is_picked_for_every_size(dtype: torch.dtype, gate_up: str, requantize: str) -> None:
    for T in (1, 2, 8, 33, 128, 700, 8192):
        for E, A, H, I in ((8, 2, 4096, 14336), (128, 8, 2048, 768), (32, 4, 2880, 2880), (1, 1, 40, 24)):
            problem = LayerProblem(T, A, E, H, I, dtype, requantize, gate_up)
            config = plan.pick(problem, H200)
            assert config is not None
            assert plan.supports(problem, config, H200) is None


@pytest.mark.parametrize("gate_up", ["concatenated", "none"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_wider_intermediate_takes_more_shared_memory(dtype: torch.dtype, gate_up: str) -> None:
    """Of a float16 or float32 hidden, h is float32, and so are a warp-specialised tile's results on their way out."""
    for T in (1, 300, 700, 8192):
        narrow, wide = (LayerProblem(T, 8, 128, 2048, 768, dtype, "token", gate_up, size) for size in (2, 4))
        config = plan.pick(wide, H200)
        assert config is not None
        assert config.warp_specialize
        grown = config.shared_memory(1, 4) - config.shared_memory(1, 2)
        assert grown == 2 * 64 * config.block_m * 2
        largest = plan.pick(narrow, H200)
        assert largest is not None
        assert largest.num_stages >= config.num_stages


def test_one_token_has_a_launch_of_its_own() -> None:
    """Of 8-bit weights and a warp's worth of slots; nothing else may ask for it."""
    text = "direct-16-64x256-128x256-swap-tma-ws-4w5s1p"
    config = plan.LayerConfig.parse(text)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert str(plan.pick(LayerProblem(1, 8, 128, 2048, 768, dtype), H200)) == text
        assert plan.supports(LayerProblem(1, 32, 128, 2048, 768, dtype), config, H200) is None
        for A, T in ((33, 1), (8, 2)):
            problem = LayerProblem(T, A, 128, 2048, 768, dtype)
            assert plan.supports(problem, config, H200) is not None
            picked = plan.pick(problem, H200)
            assert picked is not None
            assert picked.launch == "queue"
    long = plan.pick(LayerProblem(1, 2, 8, 4096, 14336, torch.int8), H200)
    assert long is not None
    assert (long.launch, long.down_k) == ("direct", 128)
    brain = LayerProblem(1, 8, 128, 2048, 768, torch.bfloat16)
    assert "8-bit" in str(plan.supports(brain, plan.LayerConfig.parse(text.replace("x256", "x128")), H200))
    wide = plan.LayerConfig.parse("direct-16-128x128-256x128-swap-tma-ws-4w4s1p")
    assert "down_n of 64 or 128" in str(plan.supports(LayerProblem(1, 8, 128, 2048, 768, torch.int8), wide, H200))


def test_a_ring_that_is_too_short_is_refused() -> None:
    """One slot is emptied when the next one is multiplied: it would wait for itself. For tiles of 64 channels see
    tests/test_hopper_protocol.py."""
    problem = LayerProblem(16, 4, 32, 1024, 512, torch.int8)
    one = plan.LayerConfig.parse("queue-16-64x128-128x128-swap-tma-ws-4w1s1p")
    assert "2 stages" in str(plan.supports(problem, one, H200))
    assert plan.supports(problem, plan.LayerConfig.parse(str(one).replace("4w1s", "4w2s")), H200) is None
    three = plan.LayerConfig.parse("queue-16-32x128-64x128-swap-tma-ws-4w3s1p")
    assert "even number of stages" in str(plan.supports(problem, three, H200))
    assert plan.supports(problem, plan.LayerConfig.parse(str(three).replace("4w3s", "4w4s")), H200) is None
